// Compares the speed of an answer with speculation and without. The answers of one seed have one text.

import { element } from "./element.js";
import * as format from "./format.js";
import { generate, newAnswer, speed } from "./generate.js";
import { RUNS, verdict } from "./verdict.js";

const TITLES = { speculative: "Speculative", plain: "Plain" };

export class Comparison {
  constructor() {
    this.place = element("div", { class: "comparison", hidden: true });
  }

  clear() {
    this.place.hidden = true;
    this.place.replaceChildren();
  }

  /** Generates the answer again, in turn with speculation and without: in one batch they would share steps. The answer on the
   * page is the first run of its kind. */
  async run(answer, messages, signal) {
    const kind = answer.settings.speculation ? "speculative" : "plain";
    const other = kind === "plain" ? "speculative" : "plain";
    const runs = { speculative: [], plain: [] };
    runs[kind].push(answer);
    this.#show(runs, answer);
    for (const name of [other, ...Array(RUNS - 1).fill([kind, other]).flat()]) {
      const again = newAnswer({ ...answer.settings, speculation: name === "speculative" }, answer.model);
      await generate(again, messages, signal, () => {});
      if (again.finish === "stopped") return this.#say("The comparison was stopped.");
      if (again.finish === "error") return this.#say(again.error.message, "bad");
      if (again.fingerprint !== answer.fingerprint) return this.#say("The server has changed since this answer: answer again, then compare.", "warn");
      runs[name].push(again);
      const isOver = this.#show(runs, answer);
      if (isOver) return;
    }
  }

  /** Returns whether the verdict needs no further runs. */
  #show(runs, answer) {
    const speeds = Object.fromEntries(Object.entries(runs).map(([name, answers]) => [name, answers.map(speed).filter((value) => value !== null)]));
    const all = [...runs.speculative, ...runs.plain];
    const state = { isSame: all.every(({ text }) => text === answer.text), drafted: Math.max(0, ...runs.speculative.map(({ drafted }) => drafted)), ...speeds };
    const hasBoth = runs.speculative.length > 0 && runs.plain.length > 0;
    const medians = Object.fromEntries(Object.entries(speeds).map(([name, values]) => [name, median(values)]));
    const fastest = Math.max(...Object.values(medians).map((value) => value ?? 0));
    this.rows = Object.keys(TITLES).map((name) => bar(TITLES[name], medians[name], fastest, name));
    const { text, tone } = hasBoth ? verdict(state) : { text: "Generating the same answer the other way …", tone: "" };
    this.#say(text, tone);
    return hasBoth && (!state.isSame || !state.drafted || Object.values(speeds).some((values) => values.length === 0));
  }

  #say(text, tone = "") {
    this.place.hidden = false;
    this.place.replaceChildren(...(this.rows ?? []), element("p", { class: `verdict ${tone}`, role: "status", textContent: text }));
  }
}

function bar(title, value, fastest, name) {
  const fill = element("i");
  fill.style.width = `${fastest && value ? Math.round((100 * value) / fastest) : 0}%`;
  return element(
    "div",
    { class: `speed-row ${name}` },
    element("span", { textContent: title }),
    element("span", { class: "meter", "aria-hidden": "true" }, fill),
    element("span", { class: "number" }, element("b", { textContent: format.speed(value) }), " tok/s"),
  );
}

function median(values) {
  if (values.length === 0) return null;
  const sorted = values.toSorted((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
