// A chart in a figure: lines, a legend with the values at the cursor, and keyboard control.

import { byId, element } from "./element.js";
import { trimmed } from "./format.js";
import uPlot from "./vendor/uPlot.js";

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
const colours = new Map();

const themed = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

/** The colour of a name in all charts. Categories get colours in the order of their first use. */
function colourOf(name) {
  if (name in FIXED) return themed(FIXED[name]);
  if (!colours.has(name)) colours.set(name, colours.size % SERIES);
  return themed(`--series-${colours.get(name) + 1}`);
}

const onThemeChange = (listener) =>
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener);

const FONT = "12px system-ui, sans-serif";
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const times = (plot, splits) => splits.map((seconds) => clock.format(1000 * seconds));
const whole = (plot, splits) => splits.map((value) => (Number.isInteger(value) ? value : ""));

export class Chart {
  /**
   * @param {string} id of the figure
   * @param {object} options `time`: whether x is a time; `format`: converts a value to text; `top`: least upper end of the y axis;
   *   `fixed`: whether `top` is its only upper end; `empty`: text without values
   */
  constructor(id, { time = true, format, top, fixed = false, empty }) {
    Object.assign(this, { time, format, top, fixed, empty });
    const figure = byId(id);
    this.title = figure.querySelector("figcaption").textContent;
    this.place = element("div", { class: "plot", tabIndex: 0, role: "img" });
    this.message = element("p", { class: "empty", hidden: true });
    this.legend = element("ul", { class: "legend", "aria-hidden": "true" });
    this.place.append(this.message);
    figure.append(this.place, this.legend);
    this.labels = [];
    this.data = [[]];
    this.shades = [];
    this.place.addEventListener("keydown", (event) => this.#step(event));
    this.place.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
    new ResizeObserver(() => this.plot?.setSize(this.#size())).observe(this.place);
    onThemeChange(() => this.#build());
  }

  /** `lines` is {label: values}, each as long as `xs`; `shades` are pairs of x with a shaded background between them. */
  draw(xs, lines, shades = []) {
    const labels = Object.keys(lines);
    this.data = [xs, ...Object.values(lines)];
    this.shades = shades;
    if (labels.join("\n") !== this.labels.join("\n") || !this.plot) {
      this.labels = labels;
      this.#build();
    } else {
      this.plot.setData(this.data);
    }
    const hasValues = this.data.slice(1).some((values) => values.some((value) => value != null));
    this.message.hidden = hasValues;
    this.place.classList.toggle("nothing", !hasValues);
    this.message.textContent = this.empty;
    this.#describe(hasValues);
    this.#values();
  }

  #build() {
    this.plot?.destroy();
    this.legend.replaceChildren(
      ...this.labels.map((label) => {
        const swatch = element("i");
        swatch.style.background = colourOf(label);
        return element("li", {}, swatch, `${label} `, element("b"));
      }),
    );
    this.plot = new uPlot(this.#options(), this.data, this.place);
    this.#values();
  }

  #options() {
    const axis = { stroke: themed("--muted"), font: FONT, grid: { stroke: themed("--line"), width: 1 }, ticks: { show: false } };
    return {
      ...this.#size(),
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, y: false, sync: this.time ? { key: "time" } : undefined },
      scales: {
        x: this.time ? { time: true } : { time: false, range: (plot, low, high) => [0.75, Math.max(high, 2) + 0.25] },
        y: { range: (plot, low, high) => [0, this.fixed ? this.top : Math.max(this.top, 1.15 * (high ?? 0))] },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 28, values: this.time ? times : whole, space: this.time ? 80 : 30 },
        { ...axis, size: 58, values: (plot, splits) => splits.map((value) => trimmed(this.format(value))) },
      ],
      series: [
        {},
        ...this.labels.map((label) => ({
          label,
          stroke: colourOf(label),
          width: label === "all" ? 2 : 1.75,
          fill: label === "all" ? themed("--shade") : undefined,
          points: { show: !this.time, size: 6, fill: colourOf(label) },
          spanGaps: false,
        })),
      ],
      hooks: { setCursor: [() => this.#values()], drawClear: [(plot) => this.#shade(plot)] },
    };
  }

  #size() {
    return { width: Math.max(120, this.place.clientWidth), height: Math.max(100, this.place.clientHeight) };
  }

  #shade(plot) {
    plot.ctx.save();
    plot.ctx.fillStyle = themed("--shade");
    for (const [from, to] of this.shades) {
      const left = Math.max(plot.bbox.left, plot.valToPos(from, "x", true));
      const right = Math.min(plot.bbox.left + plot.bbox.width, plot.valToPos(to, "x", true));
      if (right > left) plot.ctx.fillRect(left, plot.bbox.top, right - left, plot.bbox.height);
    }
    plot.ctx.restore();
  }

  /** Shows the values at the cursor; without a cursor, the last values or those of the first position. */
  #values() {
    const at = this.plot?.cursor.idx ?? (this.time ? this.data[0].length - 1 : 0);
    this.labels.forEach((label, line) => {
      const item = this.legend.children[line];
      if (item) item.lastChild.textContent = this.format(this.data[line + 1][at]);
    });
  }

  #describe(hasValues) {
    const last = this.data[0].length - 1;
    const values = this.labels.map((label, line) => {
      const column = this.data[line + 1];
      const text = this.time ? this.format(column[last]) : column.filter((value) => value != null).map(this.format).join(", ");
      return `${label} ${text}`;
    });
    this.place.setAttribute("aria-label", `${this.title}: ${hasValues ? values.join("; ") : this.empty}`);
  }

  #step(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || this.data[0].length === 0) return;
    event.preventDefault();
    const last = this.data[0].length - 1;
    const from = this.plot.cursor.idx ?? (this.time ? last + 1 : -1);
    const at = Math.min(last, Math.max(0, from + steps[event.key]));
    this.plot.setCursor({ left: this.plot.valToPos(this.data[0][at], "x"), top: 1 });
  }
}
