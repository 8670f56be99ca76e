// Where a message is written. What was typed survives a reload, per conversation.
import { useRef } from "../../vendor/preact-hooks.js";
import { useSignal, useSignalEffect } from "../../vendor/signals.js";
import { html } from "../html.js";
import { current, model, rejected, send, server, stop, transcript } from "../store.js";
import { text } from "../strings.js";

const draftKey = (id) => `pageturner.draft.${id ?? "new"}`;

function keepDraft(id, value) {
  if (value) sessionStorage.setItem(draftKey(id), value);
  else sessionStorage.removeItem(draftKey(id));
}

export function Composer() {
  const area = useRef(null);
  const draft = useSignal("");

  useSignalEffect(() => {
    draft.value = sessionStorage.getItem(draftKey(current.value)) ?? "";
  });
  useSignalEffect(() => {
    // A message that was not accepted comes back, unless something else was typed meanwhile.
    const back = rejected.value;
    if (back?.transcript !== transcript.value) return;
    rejected.value = null;
    if (!draft.peek()) draft.value = back.input;
  });

  const running = transcript.value.running.value;
  const sendable = server.value === "ready" && transcript.value.status.value === "ready";
  const submit = () => {
    const input = draft.peek().trim();
    if (!input || running || !sendable) return;
    draft.value = "";
    keepDraft(current.peek(), "");
    send(input);
    area.current.focus();
  };
  const onKeyDown = (event) => {
    // While an input method composes, Enter belongs to it.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  };
  const onInput = (event) => {
    draft.value = event.target.value;
    keepDraft(current.peek(), event.target.value);
  };
  const refusal = transcript.value.refusal.value;
  return html`
    <form
      class="composer"
      onSubmit=${(event) => {
        event.preventDefault();
        submit();
      }}
    >
      ${refusal && html`<p class="problem" role="alert">${text.refused(refusal)}</p>`}
      <div class="sheet">
        <textarea
          ref=${area}
          class="message"
          rows="1"
          aria-label=${text.composerLabel}
          placeholder=${text.composerHint}
          enterkeyhint="send"
          autofocus
          value=${draft.value}
          onInput=${onInput}
          onKeyDown=${onKeyDown}
        ></textarea>
        ${running
          ? html`<button class="button" type="button" onClick=${stop}>${text.stop}</button>`
          : html`<button class="button" type="submit" disabled=${!sendable || !draft.value.trim()}>${text.send}</button>`}
      </div>
      <p class="colophon">${model.value}</p>
    </form>
  `;
}
