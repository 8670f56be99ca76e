// What the page knows. Views read these signals; server.js, conversations.js and turns.js write them.
import { computed, signal } from "../vendor/signals.js";

/** "checking", "waiting" (it is up, but takes no turns; see `delay`), "unreachable", "locked" (wants a key) or "ready". */
export const server = signal("checking");
/** Why turns have to wait, as `/readyz` tells it: {status, stage, fraction}. */
export const delay = signal(null);
export const model = signal(null);

/** Newest first: {id, title, updatedAt (ms), activeResponse}. */
export const conversations = signal([]);
export const moreConversations = signal(false);
/** Id of the conversation that is open; null is a new one that the server does not know yet. */
export const current = signal(null);

/** Spoken by screen readers, one short sentence at a time. */
export const announcement = signal("");
/** Counts the messages sent from here. */
export const sent = signal(0);

let keys = 0;
export const nextKey = () => `local-${(keys += 1)}`;

/** One conversation as shown. */
export class Transcript {
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
  /** What was typed and not sent yet; it survives a reload. */
  draft;
  #draftKey;

  constructor(status, id = "new") {
    this.status = signal(status);
    this.#draftKey = `pageturner.draft.${id}`;
    this.draft = signal(sessionStorage.getItem(this.#draftKey) ?? "");
  }

  type(input) {
    this.draft.value = input;
    if (input) sessionStorage.setItem(this.#draftKey, input);
    else sessionStorage.removeItem(this.#draftKey);
  }
}

/** By conversation id; a conversation stays here once it was open. */
export const transcripts = new Map();
/** Of the conversation that is not begun yet. */
export const fresh = signal(new Transcript("ready"));

export function transcriptOf(id) {
  if (!transcripts.has(id)) transcripts.set(id, new Transcript("loading", id));
  return transcripts.get(id);
}

/** Of the conversation that is open. */
export const transcript = computed(() => (current.value === null ? fresh.value : transcriptOf(current.value)));

/** Whether a message can be sent now. */
export const sendable = computed(() => {
  const { status, running } = transcript.value;
  return server.value === "ready" && status.value === "ready" && !running.value;
});
