// Numbers as text. Null is a dash.

const none = "–";

export const count = (value) => (value == null ? none : Math.round(value).toLocaleString("en"));
export const decimal = (value, digits = 1) => (value == null ? none : value.toFixed(digits));
export const percent = (value) => (value == null ? none : `${Math.round(100 * value)}%`);

/** 1.24 -> "1.24 s", 0.0124 -> "12.4 ms" */
export function duration(seconds) {
  if (seconds == null) return none;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  const ms = 1000 * seconds;
  return `${ms.toFixed(ms < 10 ? 2 : ms < 100 ? 1 : 0)} ms`;
}

/** Time since a start: "45 s", "12 min", "3 h", "2 d" */
export function age(seconds) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.max(0, Math.floor(seconds))} s`;
}

/** Removes trailing zeros: "1.50 s" -> "1.5 s", "50.0" -> "50" */
export const trimmed = (text) => text.replace(/\.(\d*?)0+(?!\d)/, (_, digits) => (digits ? `.${digits}` : ""));

/** Tokens per second. */
export const speed = (value) => (value == null ? none : value.toFixed(value < 100 ? 1 : 0));

/** "$1,240", "$2.69", "$0.043" */
export function dollars(value) {
  if (value == null) return none;
  if (value >= 100) return `$${count(value)}`;
  return `$${value >= 1 || value === 0 ? value.toFixed(2) : Number(value.toPrecision(2))}`;
}
