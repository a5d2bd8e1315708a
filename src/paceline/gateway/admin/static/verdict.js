// Compares the speeds of repeated answers. A difference counts only if it is larger than the spread of the repetitions.

import * as format from "./format.js";

export const RUNS = 3;

/** `tone` is good, bad or empty. `speculative` and `plain` are speeds of runs, in tokens per second. */
export function verdict({ isSame, drafted, speculative, plain }) {
  if (!isSame) return { text: "The text differs: please report this as a bug.", tone: "bad" };
  if (!drafted) return { text: "No drafts were made, so there is nothing to compare. The text is the same.", tone: "" };
  const runs = Math.min(speculative.length, plain.length);
  if (runs < RUNS) return { text: `The same text. Measuring the speed again, ${runs} of ${RUNS} runs …`, tone: "" };
  const ratio = format.decimal(median(speculative) / median(plain), 2);
  const measured = `in ${runs} runs of each`;
  if (Math.min(...speculative) > Math.max(...plain)) return { text: `${ratio}× the speed of plain ${measured}, and the same text.`, tone: "good" };
  if (Math.max(...speculative) < Math.min(...plain)) return { text: `Slower than plain: ${ratio}× ${measured}. The text is the same.`, tone: "warn" };
  return { text: `No difference in speed beyond the spread of ${runs} runs of each. The text is the same.`, tone: "" };
}

function median(values) {
  const sorted = values.toSorted((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
