// What the page says about itself: the state of the server and of the connection, seen and heard.
import { computed } from "../../vendor/signals.js";
import { html } from "../html.js";
import { link } from "../server.js";
import { announcement, delay, server } from "../state.js";
import { text } from "../strings.js";

const notice = computed(() => {
  if (server.value === "waiting") return text.waiting(delay.value);
  if (server.value === "unreachable") return text.unreachable;
  if (link.state.value === "lost") return text.reconnecting;
  if (server.value === "checking" || link.state.value === "connecting") return text.connecting;
  return "";
});

export function Notices() {
  return notice.value && html`<p class="notice"><span class="pulse" aria-hidden="true"></span>${notice.value}</p>`;
}

/** For screen readers only. The transcript itself is silent: every token would be read out. */
export function Spoken() {
  const connection = link.state.value === "lost" ? text.said.reconnecting : "";
  return html`<p class="spoken" role="status">${connection || announcement.value}</p>`;
}
