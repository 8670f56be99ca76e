// The turns of a conversation: loading them, following a running answer, sending, stopping.
import { effect } from "../vendor/signals.js";
import { Answer, textOfItems } from "./answer.js";
import { api } from "./api.js";
import { begin, touch } from "./conversations.js";
import { blocksOf } from "./markdown.js";
import { feed, unlocked } from "./server.js";
import { announcement, current, model, nextKey, sendable, sent, transcript, transcriptOf, transcripts } from "./state.js";
import { text } from "./strings.js";

// Calmer than the protocol's defaults, which small models do not bear.
const sampling = { temperature: 0.2, top_p: 0.9 };

/** Open the conversation that the address names, or a new one. */
export async function openFromAddress() {
  const id = decodeURIComponent(location.hash.slice(1)) || null;
  if (id === current.peek() && (id === null || transcripts.has(id))) return;
  current.value = id;
  if (id !== null) await load(id);
}

/** Load what the server has of it, and go on with its running answer if there is one. */
export async function load(id) {
  const shown = transcriptOf(id);
  if (shown.running.peek()) return;
  try {
    // In this order: an answer that ends in between is then in both, and is shown once; never in neither.
    const conversation = await unlocked(() => api.conversation(id));
    const items = await unlocked(() => api.items(id));
    if (shown.running.peek()) return;
    shown.messages.value = merge(shown.messages.peek(), items.flatMap(stored));
    shown.status.value = "ready";
    if (conversation.active_response) follow(id, shown, conversation.active_response);
  } catch (error) {
    shown.problem.value = error.message;
    shown.status.value = error.status === 404 ? "missing" : "failed";
  }
}

function stored(item) {
  if (item.type !== "message" || (item.role !== "user" && item.role !== "assistant")) return [];
  const content = textOfItems([item]);
  if (item.role === "user") return [{ key: item.id, role: "user", text: content }];
  const note = item.status === "incomplete" ? { kind: "unfinished" } : null;
  return [{ key: item.id, role: "assistant", blocks: blocksOf(content), note }];
}

// Answers written while this page watched know more than their stored copies (how they ended, how fast they were).
function merge(shown, loaded) {
  const watched = shown.filter((message) => message.answer);
  return loaded.map((message) => watched.find(({ answer }) => answer.itemIds.has(message.key)) ?? message);
}

function follow(id, shown, responseId) {
  const answer = new Answer({ responseId });
  const message = { key: nextKey(), role: "assistant", answer };
  shown.messages.value = [...shown.messages.peek(), message];
  watch(id, shown, answer);
  feed.follow(answer, (error) => {
    answer.fail(error.message);
    // The server does not know it any more (it began anew, say): what was stored of it is all there is.
    shown.messages.value = shown.messages.peek().filter((one) => one !== message);
    load(id);
  });
}

/** Everything that happens when an answer ends. */
function watch(id, shown, answer) {
  shown.running.value = answer;
  touch(id, { activeResponse: answer.responseId ?? "starting" });
  const stopWatching = effect(() => {
    if (answer.phase.value !== "ended") return;
    queueMicrotask(() => stopWatching());
    shown.running.value = null;
    shown.messages.value = shown.messages.peek().filter(({ key }) => !answer.itemIds.has(key));
    touch(id, { activeResponse: null });
    const kind = answer.note.peek()?.kind;
    announcement.value = text.said[kind === "stopped" || kind === "failed" ? kind : "complete"];
  });
}

/** Send what is typed in the open conversation. It comes back, with the `refusal`, when it was not accepted. */
export async function send() {
  const shown = transcript.peek();
  const input = shown.draft.peek().trim();
  if (!input || !sendable.peek()) return;
  const answer = new Answer({ startedAt: performance.now() });
  const added = [
    { key: nextKey(), role: "user", text: input },
    { key: nextKey(), role: "assistant", answer },
  ];
  shown.type("");
  shown.refusal.value = "";
  shown.messages.value = [...shown.messages.peek(), ...added];
  shown.running.value = answer;
  sent.value += 1;
  announcement.value = text.said.generating;

  const refused = ({ message }) => {
    shown.running.value = null;
    shown.messages.value = shown.messages.peek().filter((one) => !added.includes(one));
    shown.refusal.value = message;
    if (!shown.draft.peek()) shown.type(input);
  };
  let id = current.peek();
  try {
    id ??= await begin(shown, titleOf(input));
  } catch (error) {
    refused(error);
    return;
  }
  watch(id, shown, answer);
  const create = {
    type: "response.create",
    conversation: id,
    input,
    client_msg_id: randomId(),
    ...sampling,
    ...(model.peek() ? { model: model.peek() } : {}),
  };
  feed.start(answer, create, (error) => {
    touch(id, { activeResponse: null });
    refused(error);
  });
}

/** Stop the answer that is being written in the open conversation; what there is of it stays. */
export function stop() {
  const answer = transcript.peek().running.peek();
  if (answer) feed.stop(answer);
}

const titleLength = 60;

/** The first words of a message. */
export function titleOf(input) {
  const line = input.replace(/\s+/g, " ").trim();
  if (line.length <= titleLength) return line;
  const cut = line.slice(0, titleLength);
  return `${cut.slice(0, cut.lastIndexOf(" ") > 20 ? cut.lastIndexOf(" ") : titleLength)}…`;
}

// `crypto.randomUUID` is missing where the page is opened over plain HTTP from another machine.
function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
