// A colour for every name, the same in every chart, from the theme in force.

const SERIES = 6;
const FIXED = {
  all: "--text",
  p50: "--series-1",
  p90: "--series-3",
  p99: "--series-5",
  running: "--series-1",
  waiting: "--series-3",
  "drafted ahead": "--series-2",
  late: "--series-5",
};
const seen = new Map();

export const themed = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

/** Categories get the colours in the order in which they are first seen. */
export function colourOf(name) {
  if (name in FIXED) return themed(FIXED[name]);
  if (!seen.has(name)) seen.set(name, seen.size % SERIES);
  return themed(`--series-${seen.get(name) + 1}`);
}

export const onThemeChange = (listener) =>
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener);
