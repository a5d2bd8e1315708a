// The section Traffic: tiles and charts.

import { Chart } from "./chart.js";
import { byId, element } from "./element.js";
import * as format from "./format.js";

const QUIET = "No requests in the last minutes.";
const sum = (values) => values.reduce((total, value) => total + value, 0);

const charts = {
  speed: new Chart("chart-speed", { format: format.speed, top: 10, empty: QUIET }),
  alpha: new Chart("chart-alpha", { time: false, format: format.percent, top: 1, fixed: true, empty: "No drafts verified yet." }),
  depth: new Chart("chart-depth", { format: format.decimal, top: 4, empty: "No depth decided yet." }),
  ttft: new Chart("chart-ttft", { format: format.duration, top: 0.01, empty: QUIET }),
  tpot: new Chart("chart-tpot", { format: format.duration, top: 0.001, empty: QUIET }),
  load: new Chart("chart-load", { format: format.count, top: 4, empty: QUIET }),
  ahead: new Chart("chart-ahead", {
    format: format.percent, top: 1, fixed: true, empty: "No draft workers: the engine drafts.",
  }),
};

/** {"category · method": line} with the category as key if it has one method. */
function shortenKeys(lines) {
  const category = (key) => key.slice(0, key.lastIndexOf(" · "));
  const keys = Object.keys(lines);
  const isOnly = (key) => keys.filter((other) => category(other) === category(key)).length === 1;
  return Object.fromEntries(keys.map((key) => [isOnly(key) ? category(key) : key, lines[key]]));
}

function alphas(traffic) {
  const tested = traffic.filter((one) => one.alphas.length);
  const longest = Math.max(0, ...tested.map((one) => one.alphas.length));
  const positions = Array.from({ length: longest }, (_, i) => i + 1);
  const line = (one) => [`${one.category} · ${one.method}`, positions.map((i) => one.alphas[i - 1] ?? null)];
  return [positions, shortenKeys(Object.fromEntries(tested.map(line).sort()))];
}

/** Explanations of the tiles. */
const HINTS = {
  "Draft acceptance rate": "Accepted / drafted tokens of all answers since the start.",
  "First token": "Time from the request to its first token, including the wait.",
  "Per output token": "Time from first to last token, per token.",
  "Cache in use": "Share of the KV cache that running sequences hold.",
  "Million tokens": "Price of all workers over the last minute, per million tokens generated in it.",
  "Audited tokens": "Tokens that the idle engine computed again without drafts. Drifted tokens differ: there should be none.",
};

function tiles(report, last) {
  const rates = Object.values(last?.tokens_per_second ?? {});
  const [drafted, accepted] = ["drafted", "accepted"].map((name) => sum(report.traffic.map((traffic) => traffic[name])));
  const values = {
    "Tokens per second": [format.speed(sum(rates)), ""],
    "Draft acceptance rate": [format.percent(drafted ? accepted / drafted : null), drafted ? `${format.count(accepted)} of ${format.count(drafted)} since the start` : "no drafts yet"],
    "First token": [format.duration(last?.ttft?.p50), "median"],
    "Per output token": [format.duration(last?.tpot?.p50), "median"],
    "Sequences": [format.count(last?.running), `running, ${format.count(last?.waiting)} waiting`],
    "Cache in use": [format.percent(last?.kv_use), ""],
    "Audited tokens": [format.count(report.audit.audited), `${format.count(report.audit.drifted)} drifted`],
  };
  if (report.dollars_per_hour != null) {
    values["Million tokens"] = [format.dollars(report.dollars_per_million), `${format.dollars(report.dollars_per_hour)} an hour`];
  }
  byId("figures").replaceChildren(
    ...Object.entries(values).map(([name, [value, note]]) =>
      element("div", { title: HINTS[name] ?? "" }, element("dt", { textContent: name }), element("dd", {}, `${value} `, element("small", { textContent: note }))),
    ),
  );
}

function describeDrift(event) {
  const when = new Date(1000 * event.time).toLocaleTimeString();
  const levels = `from ${format.percent(event.before)} to ${format.percent(event.after)}`;
  return element("li", { textContent: `${when}: acceptance for ${event.category} (${event.method}) changed ${levels}; depth is learned again.` });
}

/** Names the draft workers that stopped drafting ahead because too few drafts were used. */
function describeStopped(workers) {
  const names = workers.filter((worker) => worker.paused_share != null).map((worker) => worker.name);
  return names.length ? ` · stopped by ${names.join(", ")}: too few drafts used` : "";
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
  charts.depth.draw(times, shortenKeys(history.columns("depth")), off);
  charts.ttft.draw(times, history.columns("ttft"), off);
  charts.tpot.draw(times, history.columns("tpot"), off);
  charts.load.draw(times, { running: history.column((s) => s.running), waiting: history.column((s) => s.waiting) }, off);
  charts.ahead.draw(
    times,
    { "drafted ahead": history.column((s) => s.prespeculation_hits), late: history.column((s) => s.late_drafts) },
    off,
  );
  byId("ahead-note").textContent = describeStopped(report.workers);
  tiles(report, history.last);
  byId("drifts").replaceChildren(...report.drifts.slice(-5).reverse().map(describeDrift));
}
