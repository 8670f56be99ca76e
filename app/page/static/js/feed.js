// The answers in progress, all over one link. Each has a lane of its own, so that answers in several conversations
// can be written at once; when the link comes back, each goes on where it stopped.
import { effect } from "../vendor/signals.js";

export class Feed {
  #link;
  #lanes = new Map(); // lane name -> {answer, create, onRefused, stopping}

  constructor(link) {
    this.#link = link;
    link.onFrame = (frame) => this.#receive(frame);
    effect(() => {
      if (link.state.value === "open") for (const lane of this.#lanes.keys()) this.#enter(lane);
    });
  }

  /**
   * Ask for a new answer. The frame carries an id of ours, so sending it twice starts one answer only.
   * @param {Answer} answer
   * @param {object} create the `response.create` frame
   * @param {(error: {code: string, message: string}) => void} onRefused when the server will not begin it
   */
  start(answer, create, onRefused) {
    this.#enter(this.#occupy({ answer, create, onRefused }));
  }

  /** Go on with an answer that is already being written. `onRefused` when the server does not know it. */
  follow(answer, onRefused) {
    this.#enter(this.#occupy({ answer, create: null, onRefused }));
  }

  stop(answer) {
    for (const [lane, entry] of this.#lanes) {
      if (entry.answer !== answer) continue;
      entry.stopping = true;
      this.#cancelIfWanted(lane, entry);
    }
  }

  /** Forget an answer without stopping it. */
  drop(answer) {
    for (const [lane, entry] of this.#lanes) if (entry.answer === answer) this.#lanes.delete(lane);
  }

  #receive(frame) {
    const lane = frame.stream_id;
    const entry = this.#lanes.get(lane);
    if (!entry) return;
    if (frame.type === "error") {
      // A stop that came too late is no failure of the answer.
      if (entry.stopping && entry.answer.responseId && frame.error.code === "response_not_active") return;
      this.#lanes.delete(lane);
      entry.onRefused(frame.error);
      return;
    }
    const known = entry.answer.responseId !== null;
    entry.answer.apply(frame);
    if (entry.answer.phase.peek() === "ended") this.#lanes.delete(lane);
    else if (!known) this.#cancelIfWanted(lane, entry);
  }

  // A connection accepts few names, so the free ones are taken again.
  #occupy(entry) {
    let number = 1;
    while (this.#lanes.has(`page-${number}`)) number += 1;
    this.#lanes.set(`page-${number}`, entry);
    return `page-${number}`;
  }

  #enter(lane) {
    const entry = this.#lanes.get(lane);
    const { answer, create } = entry;
    if (answer.responseId === null) {
      this.#link.send({ ...create, stream_id: lane });
    } else {
      const from = { response_id: answer.responseId, starting_after: answer.lastSequence };
      this.#link.send({ type: "response.attach", ...from, stream_id: lane });
      this.#cancelIfWanted(lane, entry);
    }
  }

  #cancelIfWanted(lane, { stopping, answer }) {
    if (!stopping || answer.responseId === null) return;
    this.#link.send({ type: "response.cancel", response_id: answer.responseId, stream_id: lane });
  }
}
