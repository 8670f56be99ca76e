// Where a message is written. What was typed survives a reload, per conversation.
import { useRef } from "../../vendor/preact-hooks.js";
import { html } from "../html.js";
import { model, sendable, transcript } from "../state.js";
import { text } from "../strings.js";
import { send, stop } from "../turns.js";

export function Composer() {
  const area = useRef(null);
  const { draft, refusal, running } = transcript.value;

  const submit = (event) => {
    event.preventDefault();
    send();
    area.current.focus();
  };
  const stopAndGoOn = () => {
    stop();
    // The button goes away, and the focus would with it.
    area.current.focus();
  };
  const onKeyDown = (event) => {
    // While an input method composes, Enter belongs to it.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    submit(event);
  };
  return html`
    <form class="composer" onSubmit=${submit}>
      ${refusal.value && html`<p class="problem" role="alert">${text.refused(refusal.value)}</p>`}
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
          onInput=${(event) => transcript.peek().type(event.target.value)}
          onKeyDown=${onKeyDown}
        ></textarea>
        ${running.value
          ? html`<button key="stop" class="button" type="button" onClick=${stopAndGoOn}>${text.stop}</button>`
          : html`<button key="send" class="button" type="submit" disabled=${!sendable.value || !draft.value.trim()}>${text.send}</button>`}
      </div>
      <p class="colophon">${model.value}</p>
    </form>
  `;
}
