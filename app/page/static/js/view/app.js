import { useSignal, useSignalEffect } from "../../vendor/signals.js";
import { html } from "../html.js";
import { conversations, current, server, transcript } from "../state.js";
import { text } from "../strings.js";
import { Composer } from "./composer.js";
import { Contents } from "./contents.js";
import { Heading } from "./heading.js";
import { Key } from "./key.js";
import { Notices, Spoken } from "./notices.js";
import { Transcript } from "./transcript.js";

export function App() {
  const drawer = useSignal(false); // on a narrow screen the contents lie over the page
  useSignalEffect(() => {
    const title = conversations.value.find(({ id }) => id === current.value)?.title;
    document.title = title ? `${title} · ${text.name}` : text.name;
  });
  if (server.value === "locked") return html`<${Key} />`;
  return html`
    <div class="desk" data-drawer=${drawer.value ? "open" : "closed"}>
      <${Contents} drawer=${drawer} />
      <button class="veil" tabindex="-1" aria-hidden="true" onClick=${() => (drawer.value = false)}></button>
      <main class="page">
        <${Heading} drawer=${drawer} />
        <${Notices} />
        <${Transcript} key=${transcript.value.key} />
        <${Composer} />
      </main>
      <${Spoken} />
    </div>
  `;
}
