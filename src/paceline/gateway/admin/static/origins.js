// The origin of each token of a text: accepted, recovered, bonus or plain.
//
// A text stores its origins as one string of lengths and letters: "4a1r" is a token of four characters that was drafted and
// accepted, then one of one character that replaced a rejected draft.

import { element } from "./element.js";

const LETTERS = { accepted: "a", recovered: "r", bonus: "b", plain: "p" };
const NAMES = Object.fromEntries(Object.entries(LETTERS).map(([name, letter]) => [letter, name]));

/** The origins of `content`, of which `pieces` ({text, origin}) may have more: the reasoning before it. */
export function packOrigins(pieces, content) {
  const raw = pieces.map(({ text }) => text).join("");
  const start = raw.lastIndexOf(content);
  if (start < 0) return "";
  const end = start + content.length;
  const packed = [];
  let at = 0;
  for (const { text, origin } of pieces) {
    const length = Math.min(at + text.length, end) - Math.max(at, start);
    if (length > 0) packed.push(length, LETTERS[origin]);
    at += text.length;
  }
  return packed.join("");
}

/** [{start, end, origin}] of a packed string. */
export function unpackOrigins(packed) {
  let start = 0;
  return [...packed.matchAll(/(\d+)([abpr])/g)].map(([, length, letter]) => {
    const span = { start, end: start + Number(length), origin: NAMES[letter] };
    start = span.end;
    return span;
  });
}

/** Wraps the text of `place` into elements coloured by origin. `source` is the Markdown it was made of, which starts at `offset`
 * of the text that `spans` describe. Characters of Markdown that are not shown have no colour. */
export function colour(place, source, offset, spans) {
  const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) if (!walker.currentNode.parentElement.closest("[data-no-origin]")) nodes.push(walker.currentNode);
  let position = 0;
  for (const node of nodes) {
    const parts = [];
    for (const line of node.data.split(/(\n)/)) { // lines of a quote or list have other characters between them
      const at = line === "" ? -1 : source.indexOf(line, position);
      if (at < 0) parts.push(line);
      else {
        parts.push(...cut(line, offset + at, spans));
        position = at + line.length;
      }
    }
    node.replaceWith(...parts);
  }
}

/** The parts of `text`, which starts at `start`, by token. */
function cut(text, start, spans) {
  const end = start + text.length;
  return spans
    .slice(firstAfter(spans, start), firstFrom(spans, end))
    .map((span) => {
      const part = text.slice(Math.max(span.start, start) - start, Math.min(span.end, end) - start);
      return span.origin === "plain" ? part : element("span", { class: span.origin, textContent: part });
    });
}

/** Index of the first span that ends after `position`. */
const firstAfter = (spans, position) => search(spans, (span) => span.end > position);
/** Index of the first span that starts at `position` or later. */
const firstFrom = (spans, position) => search(spans, (span) => span.start >= position);

function search(spans, isBeyond) {
  let [low, high] = [0, spans.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isBeyond(spans[middle])) high = middle;
    else low = middle + 1;
  }
  return low;
}
