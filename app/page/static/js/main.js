import { render } from "../vendor/preact.js";
import { effect } from "../vendor/signals.js";
import { loadConversations } from "./conversations.js";
import { html } from "./html.js";
import { look } from "./server.js";
import { server } from "./state.js";
import { openFromAddress } from "./turns.js";
import { App } from "./view/app.js";

render(html`<${App} />`, document.getElementById("app"));

effect(() => {
  if (server.value !== "ready") return;
  loadConversations();
  openFromAddress();
});
addEventListener("popstate", openFromAddress);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && server.peek() === "ready") loadConversations();
});
look();
