// One answer while it is written: takes the events of its response and shows text at most once a frame.
import { signal } from "../vendor/signals.js";
import { Document } from "./markdown.js";

const terminal = new Set(["response.completed", "response.incomplete", "response.failed"]);

export class Answer {
  responseId;
  /** The highest sequence number seen: where to go on after a lost connection. */
  lastSequence = -1;
  /** Ids of the output items, by which a stored copy of the same answer is recognised. */
  itemIds = new Set();
  text = "";
  /** What is shown: blocks of markup, the same objects for the blocks that did not change. */
  blocks = signal([]);
  /** "waiting" (nothing written yet), "writing" or "ended". */
  phase = signal("waiting");
  /** How it ended, when not simply complete: {kind: "stopped" | "cutOff" | "failed", message}. */
  note = signal(null);
  /** {read, cached, written, firstMs, perSecond} once it has ended; the last two are null where not measured here. */
  usage = signal(null);

  #document = new Document();
  #frame = 0;
  #startedAt;
  #firstAt = null;
  #lastAt = null;

  /** @param {{responseId?: string, startedAt?: number}} from `startedAt` only when the question was sent from here. */
  constructor({ responseId = null, startedAt = null } = {}) {
    this.responseId = responseId;
    this.#startedAt = startedAt;
  }

  /** Take one event of this response; events seen before are passed over. */
  apply(event) {
    if (event.sequence_number !== undefined) {
      if (event.sequence_number <= this.lastSequence) return;
      this.lastSequence = event.sequence_number;
    }
    if (this.phase.peek() === "ended") return;
    if (event.response?.id) this.responseId = event.response.id;
    if (event.type === "response.output_item.added") this.itemIds.add(event.item.id);
    else if (event.type === "response.output_text.delta") this.#write(event.delta);
    else if (terminal.has(event.type)) this.#end(event.response);
  }

  /** End it for a reason that came from outside its own events. */
  fail(message) {
    this.#finish({ kind: "failed", message });
  }

  #write(delta) {
    const now = performance.now();
    this.#firstAt ??= now;
    this.#lastAt = now;
    this.text += delta;
    this.phase.value = "writing";
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.blocks.value = this.#document.update(this.text, false);
    });
  }

  #end(response) {
    for (const item of response.output ?? []) this.itemIds.add(item.id);
    // The final object is the truth: it holds the whole text even when this page saw only the end of the stream.
    this.text = textOfItems(response.output ?? []) || this.text;
    if (response.usage) this.usage.value = this.#measured(response.usage);
    this.#finish(noteOf(response));
  }

  #finish(note) {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.blocks.value = this.#document.update(this.text, true);
    this.note.value = note;
    this.phase.value = "ended";
  }

  #measured(usage) {
    const timed = this.#startedAt !== null && this.#firstAt !== null;
    const span = timed ? (this.#lastAt - this.#firstAt) / 1000 : 0;
    return {
      read: usage.input_tokens,
      cached: usage.input_tokens_details.cached_tokens,
      written: usage.output_tokens,
      firstMs: timed ? this.#firstAt - this.#startedAt : null,
      perSecond: span > 0 && usage.output_tokens > 1 ? (usage.output_tokens - 1) / span : null,
    };
  }
}

function noteOf(response) {
  if (response.status === "cancelled") return { kind: "stopped" };
  if (response.status === "failed") return { kind: "failed", message: response.error?.message };
  if (response.status === "incomplete") return { kind: "cutOff" };
  return null;
}

/** The text of message items, as the wire has them. */
export function textOfItems(items) {
  return items
    .filter((item) => item.type === "message")
    .flatMap((item) => item.content)
    .map((part) => part.text ?? part.refusal ?? "")
    .join("");
}
