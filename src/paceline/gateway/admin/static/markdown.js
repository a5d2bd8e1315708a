// Markdown as elements. marked reads it; the elements are made here, so that no text of a model is ever parsed as HTML.

import { element } from "./element.js";
import { colour } from "./origins.js";
import { lexer } from "./vendor/marked.js";

const OPTIONS = { gfm: true, breaks: true };
const SAFE_LINK = /^(https?:|mailto:)/i;

const inline = (tokens = []) => tokens.flatMap(inlineElement);
const blocks = (tokens) => tokens.map(blockElement).filter(Boolean);

function inlineElement(token) {
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return element(token.type, {}, ...inline(token.tokens));
    case "codespan":
      return element("code", { textContent: token.text });
    case "br":
      return element("br");
    case "link":
      return link(token.href, inline(token.tokens));
    case "image": // not loaded: its address could tell another server of this chat
      return link(token.href, [token.text || token.href]);
    case "checkbox":
      return [token.checked ? "☑ " : "☐ "];
    default:
      return token.tokens ? inline(token.tokens) : [token.text ?? token.raw];
  }
}

function link(href, content) {
  if (!SAFE_LINK.test(href)) return content;
  return element("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...content);
}

function blockElement(token) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return element(`h${Math.min(6, token.depth + 2)}`, {}, ...inline(token.tokens));
    case "code":
      return code(token);
    case "blockquote":
      return element("blockquote", {}, ...blocks(token.tokens));
    case "list":
      return list(token);
    case "table":
      return table(token);
    case "hr":
      return element("hr");
    case "text":
      return element("div", {}, ...(token.tokens ? inline(token.tokens) : [token.text]));
    default: // a paragraph; HTML is shown as it is written
      return element("p", {}, ...(token.tokens ? inline(token.tokens) : [(token.text ?? token.raw).trim()]));
  }
}

function code({ lang, text }) {
  const name = /^[\w+#.-]*/.exec(lang ?? "")[0];
  return element(
    "div",
    { class: "code" },
    element(
      "div",
      { class: "code-bar", "data-no-origin": "" },
      element("span", { textContent: name || "text" }),
      element("button", { type: "button", class: "quiet", "data-copy-code": "", textContent: "Copy", "aria-label": "Copy code" }),
    ),
    element("pre", { tabIndex: 0, role: "region", "aria-label": `Code, ${name || "text"}` }, element("code", { textContent: text })),
  );
}

function list({ ordered, start, items }) {
  const place = element(ordered ? "ol" : "ul", {}, ...items.map((item) => element("li", {}, ...blocks(item.tokens))));
  if (ordered && start !== 1) place.start = start;
  return place;
}

function table({ header, rows }) {
  const cell = (tag) => (content) => element(tag, { class: content.align ?? "" }, ...inline(content.tokens));
  return element(
    "div",
    { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Table" },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...header.map(cell("th")))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell("td"))))),
    ),
  );
}

/** Shows a text that grows. Only blocks that changed are made again, so that a selection in the others stays. */
export class MarkdownView {
  #shown = [];
  #isColoured = false;

  constructor(place) {
    this.place = place;
  }

  /** With `spans` of origins.js the tokens are coloured. */
  show(text, spans = null) {
    if (this.#isColoured !== (spans !== null)) this.#reset();
    this.#isColoured = spans !== null;
    let offset = 0;
    let count = 0;
    for (const token of lexer(text.replaceAll("\r", " "), OPTIONS)) {
      const made = this.#shown[count]?.raw === token.raw ? null : blockElement(token);
      if (made && spans) colour(made, token.raw, offset, spans);
      offset += token.raw.length;
      if (token.type === "space" || token.type === "def") continue;
      if (made && this.#shown[count]) this.#shown[count].node.replaceWith(made);
      else if (made) this.place.append(made);
      if (made) this.#shown[count] = { raw: token.raw, node: made };
      count += 1;
    }
    for (const { node } of this.#shown.splice(count)) node.remove();
  }

  #reset() {
    this.#shown = [];
    this.place.replaceChildren();
  }
}
