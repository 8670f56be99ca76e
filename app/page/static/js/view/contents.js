// The list of conversations, set like a table of contents.
import { loadMoreConversations, newChat } from "../conversations.js";
import { html } from "../html.js";
import { conversations, current, moreConversations } from "../state.js";
import { text } from "../strings.js";

export function Contents({ drawer }) {
  const close = () => (drawer.value = false);
  return html`
    <nav class="contents" aria-label=${text.contents}>
      <p class="brand">${text.name}</p>
      <button
        class="button wide"
        type="button"
        onClick=${() => {
          newChat();
          close();
        }}
      >
        ${text.newChat}
      </button>
      <h2 class="label">${text.contents}</h2>
      ${conversations.value.length === 0 && html`<p class="quiet">${text.noConversations}</p>`}
      <ol class="entries">
        ${conversations.value.map((one) => html`<${Entry} key=${one.id} conversation=${one} close=${close} />`)}
      </ol>
      ${moreConversations.value &&
      html`<button class="plain" type="button" onClick=${loadMoreConversations}>${text.moreConversations}</button>`}
    </nav>
  `;
}

function Entry({ conversation, close }) {
  const { id, title, updatedAt, activeResponse } = conversation;
  const date = new Date(updatedAt);
  return html`
    <li>
      <a
        class="entry"
        href=${`#${encodeURIComponent(id)}`}
        aria-current=${id === current.value ? "page" : undefined}
        data-active=${activeResponse ? "yes" : "no"}
        onClick=${close}
      >
        <span class="entry-title">${title}</span>
        <time class="entry-when" dateTime=${date.toISOString()}>${text.when(date)}</time>
      </a>
    </li>
  `;
}
