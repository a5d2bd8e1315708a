// The section Traffic: tiles and charts.

import { Chart } from "./chart.js";
import { byId, element } from "./element.js";
import * as format from "./format.js";

const QUIET = "Nothing was asked in the last minutes.";
const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);

const charts = {
  speed: new Chart("chart-speed", { format: format.speed, top: 10, empty: QUIET }),
  alpha: new Chart("chart-alpha", { time: false, format: format.percent, top: 1, fixed: true, empty: "No drafts were tested yet." }),
  depth: new Chart("chart-depth", { format: format.decimal, top: 4, empty: "No depth was decided yet." }),
  ttft: new Chart("chart-ttft", { format: format.duration, top: 0.01, empty: QUIET }),
  tpot: new Chart("chart-tpot", { format: format.duration, top: 0.001, empty: QUIET }),
  load: new Chart("chart-load", { format: format.count, top: 4, empty: QUIET }),
  ahead: new Chart("chart-ahead", {
    format: format.percent, top: 1, fixed: true, empty: "No draft workers answered: drafts are made where they are checked.",
  }),
};

/** {"category · method": line} by category alone, where it has one method. */
function named(lines) {
  const category = (key) => key.slice(0, key.lastIndexOf(" · "));
  const keys = Object.keys(lines);
  const isAlone = (key) => keys.filter((other) => category(other) === category(key)).length === 1;
  return Object.fromEntries(keys.map((key) => [isAlone(key) ? category(key) : key, lines[key]]));
}

function alphas(traffic) {
  const tested = traffic.filter((one) => one.alphas.length);
  const longest = Math.max(0, ...tested.map((one) => one.alphas.length));
  const positions = Array.from({ length: longest }, (_, i) => i + 1);
  const line = (one) => [`${one.category} · ${one.method}`, positions.map((i) => one.alphas[i - 1] ?? null)];
  return [positions, named(Object.fromEntries(tested.map(line).sort()))];
}

function tiles(report, last) {
  const rates = Object.values(last?.tokens_per_second ?? {});
  const facts = {
    "Tokens per second": [format.speed(sum(rates)), ""],
    "Alpha, first position": [format.percent(mean(report.traffic.filter((one) => one.alphas.length).map((one) => one.alphas[0]))), ""],
    "First token": [format.duration(last?.ttft?.p50), "median"],
    "Per output token": [format.duration(last?.tpot?.p50), "median"],
    "Sequences": [format.count(last?.running), `running, ${format.count(last?.waiting)} waiting`],
    "Cache in use": [format.percent(last?.kv_use), ""],
    "Audited tokens": [format.count(report.audit.audited), `${format.count(report.audit.drifted)} drifted`],
  };
  byId("figures").replaceChildren(
    ...Object.entries(facts).map(([name, [value, more]]) =>
      element("div", {}, element("dt", { textContent: name }), element("dd", {}, `${value} `, element("small", { textContent: more }))),
    ),
  );
}

function drift(note) {
  const when = new Date(1000 * note.time).toLocaleTimeString();
  const levels = `from ${format.percent(note.before)} to ${format.percent(note.after)}`;
  return element("li", { textContent: `${when}: acceptance for ${note.category} (${note.method}) went ${levels}; depth is learned anew.` });
}

/** Draft workers that drafted ahead, found that it did not pay, and draft on demand. */
function stopped(workers) {
  const names = workers.filter((worker) => worker.resting != null).map((worker) => worker.name);
  return names.length ? ` · stopped by ${names.join(", ")}: it did not pay` : "";
}

export function showTraffic(report, history) {
  const times = history.times;
  const off = history.spans((sample) => !sample.speculating);
  const speeds = history.columns("tokens_per_second");
  const all = Object.keys(speeds).length
    ? { all: history.column((sample) => sum(Object.values(sample.tokens_per_second))) }
    : {};
  charts.speed.draw(times, { ...all, ...speeds }, off);
  charts.alpha.draw(...alphas(report.traffic));
  charts.depth.draw(times, named(history.columns("depth")), off);
  charts.ttft.draw(times, history.columns("ttft"), off);
  charts.tpot.draw(times, history.columns("tpot"), off);
  charts.load.draw(times, { running: history.column((s) => s.running), waiting: history.column((s) => s.waiting) }, off);
  charts.ahead.draw(
    times,
    { "drafted ahead": history.column((s) => s.prespeculation_hits), late: history.column((s) => s.late_drafts) },
    off,
  );
  byId("ahead-note").textContent = stopped(report.workers);
  tiles(report, history.last);
  byId("drifts").replaceChildren(...report.drifts.slice(-5).reverse().map(drift));
}
