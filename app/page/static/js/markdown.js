// The only way from a model's text to markup. Live and stored answers both come through here, so there is no second
// path that could forget to clean; the browser enforces it too (Trusted Types, see app/page/__init__.py).
import { Marked } from "../vendor/marked.js";
import DOMPurify from "../vendor/dompurify.js";
import { highlight } from "./highlight.js";

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (value) => value.replace(/[&<>"']/g, (char) => escapes[char]);

// A few harmless tags that models write inside markdown; every other tag is shown as the text it is.
const inlineTag = /^<\/?(?:br|kbd|sub|sup)\s*\/?>$/i;
const webAddress = /^(?:https?:|mailto:)/i;

const marked = new Marked({ gfm: true, breaks: false });
marked.use({
  renderer: {
    html: ({ text }) => (inlineTag.test(text.trim()) ? text : escape(text)),
    link({ href, tokens }) {
      const label = this.parser.parseInline(tokens);
      return webAddress.test(href) ? anchor(href, label) : label;
    },
    // Loading a picture would tell its server what was said here, so it stays a link.
    image: ({ href, text }) => (webAddress.test(href) ? anchor(href, escape(text || href)) : escape(text)),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) => {
      const code = `${text.replace(/\n$/, "")}\n`;
      return `<pre><code class="hljs">${highlight(code, lang) ?? escape(code)}</code></pre>\n`;
    },
  },
});

function anchor(href, label) {
  return `<a href="${escape(href)}" target="_blank" rel="noopener noreferrer nofollow">${label}</a>`;
}

const allowed = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "kbd", "li", "ol", "p",
    "pre", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "rel", "start", "target"],
  ALLOWED_URI_REGEXP: webAddress,
  ADD_URI_SAFE_ATTR: ["align", "rel", "start", "target"], // not addresses, so not held against the pattern above
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};

function render(tokens) {
  return DOMPurify.sanitize(marked.parser(tokens), allowed);
}

// While it grows, a block longer than this is shown as plain text: parsing it anew each frame would cost too much.
const plainFrom = 16_384;

/**
 * An answer as a list of blocks (paragraph, list, code ...). Only the last block can still change while text arrives,
 * so the ones before it are rendered once and keep their elements in the page.
 */
export class Document {
  #frozen = []; // blocks that no later text can change
  #frozenLength = 0; // characters of the text that they and the space after them cover
  #open = []; // the block after them, if there is one

  /**
   * The blocks of `source`, which must begin with the text given before.
   * @param {string} source
   * @param {boolean} final true when no more text will come
   * @returns {{raw: string, html: TrustedHTML}[]} the same objects again for blocks that did not change
   */
  update(source, final) {
    if (final) return this.#finish(source);
    const rest = source.slice(this.#frozenLength);
    if (rest.length > plainFrom) return [...this.#frozen, plain(rest)];
    const tokens = marked.lexer(rest);
    const last = tokens.findLastIndex((token) => token.type !== "space");
    const closed = last > 0 ? tokens.slice(0, last) : [];
    for (const token of closed) {
      this.#frozenLength += token.raw.length;
      if (token.type === "space") continue;
      this.#frozen.push(reuse(this.#open.shift(), token) ?? block(token));
    }
    this.#open = last < 0 ? [] : [reuse(this.#open[0], tokens[last]) ?? block(tokens[last], true)];
    return [...this.#frozen, ...this.#open];
  }

  // Once more as a whole, so that an answer read live ends exactly as it will look when it is loaded again.
  #finish(source) {
    const before = [...this.#frozen, ...this.#open];
    const tokens = marked.lexer(source).filter((token) => token.type !== "space");
    return tokens.map((token, index) => {
      const whole = block(token);
      return String(before[index]?.html) === String(whole.html) ? before[index] : whole;
    });
  }
}

function block(token, growing = false) {
  // Code is coloured once it is complete.
  const draft = growing && token.type === "code";
  return { raw: token.raw, draft, html: render([draft ? { ...token, lang: "" } : token]) };
}

function reuse(old, token) {
  return old?.raw === token.raw && !old.draft ? old : null;
}

function plain(rest) {
  return { raw: rest, draft: true, html: DOMPurify.sanitize(`<p>${escape(rest)}</p>`, allowed) };
}

/** The blocks of a text that is complete. */
export function blocksOf(source) {
  return new Document().update(source, true);
}
