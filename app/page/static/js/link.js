// One websocket, kept open: it reconnects by itself, waiting longer each time.
import { signal } from "../vendor/signals.js";

const firstWait = 500; // ms
const longestWait = 15_000; // ms
const patience = 5_000; // ms a connection may take to answer a ping

export class Link {
  /** "connecting" before the first connection, "open", or "lost" while it tries again. */
  state = signal("connecting");
  /** Takes every frame that arrives. */
  onFrame = () => {};
  #address;
  #onLost;
  #socket = null;
  #timer = 0;
  #wait = firstWait;
  #wanted = false;
  #doubt = 0;

  /**
   * @param {string} address
   * @param {{onLost: () => void}} callbacks called whenever a connection was lost or could not be made
   */
  constructor(address, { onLost }) {
    this.#address = address;
    this.#onLost = onLost;
    addEventListener("online", () => this.#check());
    document.addEventListener("visibilitychange", () => document.hidden || this.#check());
  }

  open() {
    this.#wanted = true;
    this.#connect();
  }

  close() {
    this.#wanted = false;
    clearTimeout(this.#timer);
    this.#socket?.close();
  }

  /** Connect now rather than when the wait is over. */
  retry() {
    if (!this.#wanted || this.#socket) return;
    clearTimeout(this.#timer);
    this.#connect();
  }

  /** False when there is no connection: the frame was not sent. */
  send(frame) {
    if (this.state.peek() !== "open") return false;
    this.#socket.send(JSON.stringify(frame));
    return true;
  }

  // After a sleep or a change of network a connection can be dead without knowing it.
  #check() {
    if (!this.send({ type: "ping" })) {
      this.retry();
      return;
    }
    const socket = this.#socket;
    clearTimeout(this.#doubt);
    this.#doubt = setTimeout(() => socket.close(), patience);
  }

  #connect() {
    if (this.#socket) return;
    const socket = new WebSocket(this.#address);
    this.#socket = socket;
    socket.onopen = () => {
      this.#wait = firstWait;
      this.state.value = "open";
    };
    socket.onmessage = (message) => {
      clearTimeout(this.#doubt);
      this.onFrame(JSON.parse(message.data));
    };
    socket.onclose = () => {
      clearTimeout(this.#doubt);
      this.#socket = null;
      if (this.state.peek() === "open") this.state.value = "lost";
      if (!this.#wanted) return;
      // Somewhere between half and all of the wait, so that many pages do not come back at the same moment.
      this.#timer = setTimeout(() => this.#connect(), this.#wait * (0.5 + Math.random() / 2));
      this.#wait = Math.min(this.#wait * 2, longestWait);
      this.#onLost();
    };
  }
}
