import { render } from "../vendor/preact.js";
import { html } from "./html.js";
import { loadConversations, look, openFromAddress, server } from "./store.js";
import { App } from "./view/app.js";

render(html`<${App} />`, document.getElementById("app"));

addEventListener("hashchange", openFromAddress);
addEventListener("popstate", openFromAddress);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && server.peek() === "ready") loadConversations();
});
look();
