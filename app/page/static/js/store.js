// What the page knows and what a person can do to it. Views read the signals and call the functions.
import { computed, effect, signal } from "../vendor/signals.js";
import { Answer, textOfItems } from "./answer.js";
import { api, socketAddress } from "./api.js";
import { Feed } from "./feed.js";
import { Link } from "./link.js";
import { blocksOf } from "./markdown.js";
import { text } from "./strings.js";

/** "checking", "loading" (no model yet), "unreachable", "locked" (wants a key) or "ready". */
export const server = signal("checking");
export const model = signal(null);
/** Newest first: {id, title, updatedAt (ms), activeResponse}. */
export const conversations = signal([]);
export const moreConversations = signal(false);
/** Id of the conversation that is open; null is a new one that the server does not know yet. */
export const current = signal(null);
/** Counts the messages sent from here. */
export const sent = signal(0);
/** Spoken by screen readers, one short sentence at a time. */
export const announcement = signal("");

let keys = 0;
const nextKey = () => `local-${(keys += 1)}`;

/** The messages of one conversation as shown. */
class Transcript {
  key = nextKey();
  /** "loading", "ready", "missing" or "failed" (then `problem` says why). */
  status;
  problem = signal("");
  /** {key, role, text} of a user, {key, role, blocks, note} or {key, role, answer} of the assistant. */
  messages = signal([]);
  /** The answer being written, if any. */
  running = signal(null);
  /** Why the last message was not accepted, in the server's words. */
  refusal = signal("");

  constructor(status) {
    this.status = signal(status);
  }
}

const transcripts = new Map(); // conversation id -> Transcript
const fresh = signal(new Transcript("ready")); // of the new conversation

export const transcript = computed(() => (current.value === null ? fresh.value : transcriptOf(current.value)));

export const link = new Link(socketAddress(), { onFrame: (frame) => feed.receive(frame), onLost: look });
const feed = new Feed(link);

function transcriptOf(id) {
  if (!transcripts.has(id)) transcripts.set(id, new Transcript("loading"));
  return transcripts.get(id);
}

// ---- the server -----------------------------------------------------------------------------------------------

const between = 1000; // ms from one look at a server that is not ready to the next
let looking = null;

/** Find out what the server is up to, again and again until it can be used or wants a key. */
export function look() {
  looking ??= lookUntilKnown().finally(() => {
    looking = null;
  });
  return looking;
}

async function lookUntilKnown() {
  const before = server.peek();
  let state = await probe();
  const waited = state === "loading" || state === "unreachable";
  while (state === "loading" || state === "unreachable") {
    if (state === "loading" && server.peek() !== state) announcement.value = text.said.loading;
    server.value = state;
    await new Promise((resolve) => setTimeout(resolve, between));
    state = await probe();
  }
  server.value = state;
  if (state === "locked") link.close();
  else if (before === "checking" || before === "locked") await enter();
  else if (waited) link.retry();
}

async function probe() {
  const state = await api.readiness();
  if (state !== "ready") return state;
  try {
    const { data } = await api.models();
    model.value = data[0]?.id ?? null;
    return "ready";
  } catch (error) {
    return error.status === 401 ? "locked" : "unreachable";
  }
}

async function enter() {
  link.open();
  await Promise.all([loadConversations(), openFromAddress()]);
}

/** Give the key. False when the server does not know it. */
export async function login(key) {
  try {
    await api.login(key);
  } catch (error) {
    if (error.status === 401 || error.status === 403) return false;
    throw error;
  }
  await look();
  return true;
}

/** Run an action; a 401 on the way locks the page, anything else is the caller's. */
async function unlocked(action) {
  try {
    return await action();
  } catch (error) {
    if (error.status === 401) server.value = "locked";
    throw error;
  }
}

// ---- the list of conversations --------------------------------------------------------------------------------

const listed = ({ id, updated_at, created_at, metadata, active_response }) => ({
  id,
  title: metadata?.title || text.untitled,
  updatedAt: (updated_at ?? created_at) * 1000,
  activeResponse: active_response ?? null,
});

export async function loadConversations() {
  try {
    const page = await unlocked(() => api.conversations());
    conversations.value = page.data.map(listed);
    moreConversations.value = page.has_more;
  } catch {
    // The list stays as it was; the state of the server and of the link is shown elsewhere.
  }
}

export async function loadMoreConversations() {
  const page = await unlocked(() => api.conversations(conversations.peek().at(-1)?.id));
  const seen = new Set(conversations.peek().map(({ id }) => id));
  conversations.value = [...conversations.peek(), ...page.data.map(listed).filter(({ id }) => !seen.has(id))];
  moreConversations.value = page.has_more;
}

function touch(id, change) {
  const old = conversations.peek().find((one) => one.id === id) ?? { id, title: text.untitled, activeResponse: null };
  const others = conversations.peek().filter((one) => one.id !== id);
  conversations.value = [{ ...old, updatedAt: Date.now(), ...change }, ...others];
}

// ---- one conversation -----------------------------------------------------------------------------------------

export function newChat() {
  fresh.value = new Transcript("ready");
  current.value = null;
  history.pushState(null, "", "#");
}

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
    // In this order: an answer that ends in between is then in both, which `merge` mends, never in neither.
    const [conversation, items] = [await unlocked(() => api.conversation(id)), await unlocked(() => api.items(id))];
    if (shown.running.peek()) return;
    shown.messages.value = merge(shown.messages.peek(), items.flatMap(stored));
    shown.status.value = "ready";
    const active = conversation.active_response;
    if (active) follow(id, typeof active === "string" ? active : active.id);
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

function follow(id, responseId) {
  const shown = transcriptOf(id);
  const answer = new Answer({ responseId });
  const message = { key: nextKey(), role: "assistant", answer };
  shown.messages.value = [...shown.messages.peek(), message];
  watch(id, shown, answer);
  feed.follow(answer, (error) => {
    answer.fail(error.message);
    reload(id, shown, message);
  });
}

// Its log is gone (the server began anew, say): what was stored of it is all there is.
function reload(id, shown, message) {
  shown.messages.value = shown.messages.peek().filter((one) => one !== message);
  load(id);
}

/** Everything that happens when an answer ends. */
function watch(id, shown, answer) {
  shown.running.value = answer;
  touch(id, { activeResponse: answer.responseId ?? "starting" });
  const stopWatching = effect(() => {
    if (answer.phase.value !== "ended") return;
    queueMicrotask(() => stopWatching());
    shown.running.value = null;
    const repeated = ({ key }) => answer.itemIds.has(key);
    shown.messages.value = shown.messages.peek().filter((message) => !repeated(message));
    touch(id, { activeResponse: null });
    const kind = answer.note.peek()?.kind;
    announcement.value = text.said[kind === "stopped" || kind === "failed" ? kind : "complete"];
  });
}

// ---- turns ----------------------------------------------------------------------------------------------------

/** Send a message in the open conversation. The text comes back through `refusal` when it was not accepted. */
export async function send(input) {
  const shown = transcript.peek();
  if (shown.running.peek()) return;
  const answer = new Answer({ startedAt: performance.now() });
  const added = [
    { key: nextKey(), role: "user", text: input },
    { key: nextKey(), role: "assistant", answer },
  ];
  shown.refusal.value = "";
  shown.messages.value = [...shown.messages.peek(), ...added];
  shown.running.value = answer;
  sent.value += 1;
  announcement.value = text.said.generating;

  const refused = ({ message }) => {
    shown.running.value = null;
    shown.messages.value = shown.messages.peek().filter((one) => !added.includes(one));
    shown.refusal.value = message;
    rejected.value = { transcript: shown, input };
  };
  let id = current.peek();
  try {
    if (id === null) id = await begin(shown, input);
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
    ...(model.peek() ? { model: model.peek() } : {}),
  };
  feed.start(answer, create, (error) => {
    touch(id, { activeResponse: null });
    refused(error);
  });
}

/** The last message that was not accepted, for the composer to take back. */
export const rejected = signal(null);

async function begin(shown, input) {
  const { id } = await unlocked(() => api.createConversation(titleOf(input)));
  transcripts.set(id, shown);
  touch(id, { title: titleOf(input) });
  // Someone may have opened another conversation while this one was made.
  if (transcript.peek() === shown) {
    current.value = id;
    history.pushState(null, "", `#${encodeURIComponent(id)}`);
  }
  if (fresh.peek() === shown) fresh.value = new Transcript("ready");
  return id;
}

export function stop() {
  const answer = transcript.peek().running.peek();
  if (answer) feed.stop(answer);
}

export async function rename(id, title) {
  const trimmed = title.trim();
  if (!trimmed) return;
  await unlocked(() => api.renameConversation(id, trimmed));
  conversations.value = conversations.peek().map((one) => (one.id === id ? { ...one, title: trimmed } : one));
}

export async function remove(id) {
  await unlocked(() => api.deleteConversation(id));
  const answer = transcripts.get(id)?.running.peek();
  if (answer) feed.drop(answer);
  transcripts.delete(id);
  conversations.value = conversations.peek().filter((one) => one.id !== id);
  if (current.peek() === id) newChat();
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
