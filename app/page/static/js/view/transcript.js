// The turns of the open conversation.
import { useRef } from "../../vendor/preact-hooks.js";
import { html } from "../html.js";
import { current, transcript } from "../state.js";
import { text } from "../strings.js";
import { load } from "../turns.js";
import { useStickToBottom } from "./stick.js";

export function Transcript() {
  const shown = transcript.value;
  const scroller = useRef(null);
  const { away, jump } = useStickToBottom(scroller);
  const messages = shown.messages.value;
  return html`
    <div class="scroller" ref=${scroller} tabindex="-1">
      <div class="turns" role="log" aria-live="off" aria-label=${text.transcript}>
        ${messages.length === 0 ? html`<${Empty} shown=${shown} />` : numbered(messages).map(turn)}
      </div>
    </div>
    ${away.value && html`<button class="jump" type="button" onClick=${jump}>${text.jumpToLatest} ↓</button>`}
  `;
}

// Turns are numbered like pages; an answer stands on its question's page.
function numbered(messages) {
  let number = 0;
  return messages.map((message) => ({ message, number: message.role === "user" ? (number += 1) : null }));
}

function turn({ message, number }) {
  if (message.role === "user") return html`<${Question} key=${message.key} content=${message.text} number=${number} />`;
  if (message.answer) return html`<${LiveAnswer} key=${message.key} answer=${message.answer} />`;
  return html`<${Answer} key=${message.key} blocks=${message.blocks} note=${message.note} />`;
}

function Empty({ shown }) {
  const status = shown.status.value;
  if (status === "loading") return null;
  if (status === "missing") return html`<p class="empty quiet">${text.missing}</p>`;
  if (status === "failed") {
    return html`
      <div class="empty" role="alert">
        <p>${text.loadFailed(shown.problem.value)}</p>
        <button class="button" type="button" onClick=${() => load(current.peek())}>${text.retry}</button>
      </div>
    `;
  }
  return html`
    <div class="empty">
      <p class="empty-heading">${text.emptyHeading}</p>
      <p class="quiet">${text.emptyText}</p>
    </div>
  `;
}

function Question({ content, number }) {
  return html`
    <article class="question" aria-label=${text.you}>
      <span class="folio" aria-hidden="true">${number}</span>
      <p>${content}</p>
    </article>
  `;
}

function LiveAnswer({ answer }) {
  return html`
    <${Answer}
      blocks=${answer.blocks.value}
      note=${answer.note.value}
      usage=${answer.usage.value}
      phase=${answer.phase.value}
    />
  `;
}

function Answer({ blocks, note, usage = null, phase = "ended" }) {
  return html`
    <article class="answer" aria-label=${text.answer} aria-busy=${phase !== "ended"} data-phase=${phase}>
      <div class="prose">
        ${blocks.map((block, index) => html`<div class="block" key=${index} dangerouslySetInnerHTML=${{ __html: block.html }} />`)}
        ${phase === "waiting" && html`<p class="quiet thinking">${text.thinking}</p>`}
      </div>
      ${note && html`<${Note} ...${note} />`}
      ${usage && html`<p class="usage">${usageLine(usage)}</p>`}
    </article>
  `;
}

function Note({ kind, message }) {
  if (kind === "failed") return html`<p class="problem" role="alert">${text.failed(message ?? text.failedUnknown)}</p>`;
  return html`<p class="note">${text[kind]}</p>`;
}

function usageLine({ read, cached, written, firstMs, perSecond }) {
  const { usage } = text;
  return [
    usage.read(read, cached),
    usage.written(written),
    firstMs !== null && usage.first(firstMs),
    perSecond !== null && usage.rate(perSecond),
  ]
    .filter(Boolean)
    .join(" · ");
}
