// Copies answers and blocks of code. On a page without HTTPS browsers have no clipboard; a selection is copied there.

import { element } from "./element.js";

const SHOWN_MS = 1500;

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { value: text, class: "unseen" });
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (!isCopied) throw new Error("the browser does not allow it");
}

/** Serves the copy buttons inside `place`. `textOf` gets the button of an answer and returns its text, with its Markdown. */
export function startCopying(place, textOf) {
  place.addEventListener("click", async ({ target }) => {
    const isCode = "copyCode" in target.dataset;
    if (!isCode && !("copy" in target.dataset)) return;
    const text = isCode ? target.closest(".code").querySelector("code").textContent : textOf(target);
    const label = target.textContent;
    try {
      await copy(text);
      target.textContent = "Copied";
    } catch {
      target.textContent = "Not allowed";
    }
    setTimeout(() => (target.textContent = label), SHOWN_MS);
  });
}
