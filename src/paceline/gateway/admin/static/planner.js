// The planner's page: load, forecast, pools, cost and decisions, from /admin/plan.

import { callAdmin } from "./api.js";
import { Chart } from "./chart.js";
import { byId, element } from "./element.js";
import * as format from "./format.js";
import { History } from "./history.js";
import { adminKey, storeAdminKey } from "./keys.js";

const INTERVAL = 2000;
const MAX_SAMPLES = 1080;
const QUIET = "No decisions yet.";
const WITHOUT_KEY = "Not configured: this server has no admin key, so that no planner can report to it. Start it with one:";
const SERVE = "PACELINE_ADMIN_KEY=choose-a-key paceline serve …";
const WITHOUT_PLANNER = "Not configured: no planner reports to this gateway. Start one with the admin key:";
const PLANNER = `PACELINE_API_KEY=choose-a-key paceline planner --url ${location.origin} …`;

let hasAdminRoutes = null;
const history = new History(MAX_SAMPLES);
const charts = {
  load: new Chart("chart-load", { format: (value) => format.decimal(value, 2), top: 1, empty: QUIET }),
  pools: new Chart("chart-pools", { format: format.count, top: 4, empty: QUIET }),
  cost: new Chart("chart-cost", { format: format.dollars, top: 1, empty: QUIET }),
};

const sizes = (sizes) => Object.entries(sizes).map(([role, size]) => `${size} ${role}`).join(", ");

function describeAction({ sizes, before, is_acting: isActing }) {
  const moves = Object.entries(sizes).filter(([role, size]) => (before[role] ?? 0) !== size);
  return `${isActing ? "set" : "advised"} ${moves.map(([role, size]) => `${role} ${before[role] ?? 0} → ${size}`).join(", ")}`;
}

function row(decision) {
  const when = new Date(1000 * decision.time);
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, element("time", { dateTime: when.toISOString(), textContent: when.toLocaleTimeString("en-GB") })),
    element("td", {}, element("span", { class: `pill ${decision.is_enough ? "" : "warn"}`, textContent: decision.cause })),
    element("td", { textContent: describeAction(decision) }),
    element("td", { class: "number", textContent: format.dollars(decision.dollars_per_hour) }),
    element("td", { textContent: decision.reason }),
  );
}

function tiles(now) {
  const rate = (value) => format.decimal(value, 2);
  const values = {
    "Load": [rate(now.load), "requests per second"],
    "Planned for": [rate(now.forecast), "requests per second"],
    "A target worker serves": [now.capacity ? rate(now.capacity) : "–", "requests per second in the objective"],
    "Planned workers": [sizes(now.sizes), now.is_enough ? "" : "the limits forbid more"],
    "Cost": [format.dollars(now.dollars_per_hour), "an hour"],
  };
  byId("figures").replaceChildren(
    ...Object.entries(values).map(([name, [value, note]]) =>
      element("div", {}, element("dt", { textContent: name }), element("dd", {}, `${value} `, element("small", { textContent: note }))),
    ),
  );
}

function show(report) {
  history.add(report.samples);
  const { current, changes } = report;
  const lacking = history.spans((sample) => !sample.is_enough);
  charts.load.draw(
    history.times,
    {
      load: history.column((sample) => sample.load),
      forecast: history.column((sample) => sample.forecast),
      capacity: history.column((sample) => (sample.capacity ? sample.capacity * (sample.sizes.target ?? 0) : null)),
    },
    lacking,
  );
  charts.pools.draw(history.times, history.columns("sizes"), lacking);
  charts.cost.draw(history.times, { cost: history.column((sample) => sample.dollars_per_hour) }, lacking);
  tiles(current);
  byId("reason").textContent = `${current.cause}: ${current.reason}`;
  byId("decision-table").tBodies[0].replaceChildren(...changes.toReversed().map(row));
}

function showState(text, tone) {
  const place = byId("state");
  if (place.textContent !== text) place.textContent = text;
  place.className = `state ${tone}`;
}

function showNote(text, command = "") {
  byId("note").replaceChildren(text, ...(command ? [" ", element("code", { textContent: command })] : []));
  byId("note").hidden = text === "";
}

function showNotConfigured(text, command) {
  byId("unlock").hidden = true;
  showNote(text, command);
  showState("not configured", "");
}

function showLocked() {
  byId("unlock").hidden = false;
  showNote("The decisions of the planner need an admin key.");
  showState("locked", "");
}

/** Whether the server has routes for a planner. It is asked first: a request that must fail would be an error in the console. */
async function canReport() {
  hasAdminRoutes ??= (await (await callAdmin(`v1/paceline/overview?since=${Number.MAX_SAFE_INTEGER}`)).json()).has_switches;
  return hasAdminRoutes;
}

async function update() {
  try {
    if (!(await canReport())) return showNotConfigured(WITHOUT_KEY, SERVE);
    if (adminKey() === null) return showLocked();
    const report = await (await callAdmin(`admin/plan?since=${history.last?.time ?? 0}`)).json();
    byId("unlock").hidden = true;
    if (report.current === null) return showNotConfigured(WITHOUT_PLANNER, PLANNER);
    byId("plan").hidden = false; // before drawing: charts take the size of their place
    showNote("");
    show(report);
    showState(report.current.is_acting ? "acting" : "advising", "good");
  } catch (error) {
    if (error.status === 401 || error.status === 403) showLocked();
    else showState(error.status ? `error ${error.status}` : "no connection, retrying", "bad");
  }
}

async function poll() {
  for (;;) {
    if (!document.hidden && (byId("unlock").hidden || document.activeElement !== byId("admin-key"))) await update();
    await new Promise((resolve) => setTimeout(resolve, INTERVAL));
  }
}

byId("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  storeAdminKey(byId("admin-key").value.trim());
  byId("admin-key").value = "";
  update();
});
poll();
