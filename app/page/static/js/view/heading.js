// The head of the page: the conversation's title, and what can be done to the whole of it.
import { useLayoutEffect, useRef } from "../../vendor/preact-hooks.js";
import { useSignal } from "../../vendor/signals.js";
import { remove, rename } from "../conversations.js";
import { html } from "../html.js";
import { conversations, current } from "../state.js";
import { text } from "../strings.js";

export function Heading({ drawer }) {
  const conversation = conversations.value.find(({ id }) => id === current.value);
  return html`
    <header class="heading">
      <button
        class="plain only-narrow"
        type="button"
        aria-label=${drawer.value ? text.closeContents : text.openContents}
        aria-expanded=${drawer.value}
        onClick=${() => (drawer.value = !drawer.value)}
      >
        <span class="bars" aria-hidden="true"></span>
      </button>
      ${conversation
        ? html`<${Title} key=${conversation.id} conversation=${conversation} />`
        : html`<h1 class="title">${text.newChat}</h1>`}
    </header>
  `;
}

function Title({ conversation }) {
  const { id, title } = conversation;
  const editing = useSignal(false);
  const problem = useSignal("");
  const attempt = (action) => action.catch((error) => (problem.value = error.message));
  const save = (event) => {
    event.preventDefault();
    editing.value = false;
    attempt(rename(id, new FormData(event.target).get("title")));
  };
  if (editing.value) return html`<${TitleForm} title=${title} onSubmit=${save} onCancel=${() => (editing.value = false)} />`;
  return html`
    <h1 class="title" title=${title}>${title}</h1>
    ${problem.value && html`<p class="problem" role="alert">${problem.value}</p>`}
    <button class="plain" type="button" onClick=${() => (editing.value = true)}>${text.rename}</button>
    <${Remove} title=${title} onRemove=${() => attempt(remove(id))} />
  `;
}

function TitleForm({ title, onSubmit, onCancel }) {
  const input = useRef(null);
  useLayoutEffect(() => input.current.select(), []);
  return html`
    <form class="title-form" onSubmit=${onSubmit} onKeyDown=${(event) => event.key === "Escape" && onCancel()}>
      <input
        class="field"
        name="title"
        aria-label=${text.renameLabel}
        defaultValue=${title}
        maxlength="200"
        required
        autofocus
        autocomplete="off"
        ref=${input}
      />
      <button class="plain" type="submit">${text.save}</button>
    </form>
  `;
}

function Remove({ title, onRemove }) {
  const dialog = useRef(null);
  return html`
    <button class="plain" type="button" onClick=${() => dialog.current.showModal()}>${text.remove}</button>
    <dialog class="dialog" ref=${dialog} aria-labelledby="remove-question">
      <form method="dialog">
        <h2 id="remove-question">${text.removeQuestion(title)}</h2>
        <p>${text.removeWarning}</p>
        <div class="choices">
          <button class="button quiet-button" autofocus>${text.keep}</button>
          <button class="button" onClick=${onRemove}>${text.remove}</button>
        </div>
      </form>
    </dialog>
  `;
}
