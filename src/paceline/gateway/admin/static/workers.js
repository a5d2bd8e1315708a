// The section Pools and workers.

import { byId, element } from "./element.js";
import * as format from "./format.js";

const TONE = { ready: "good", starting: "warn", suspected: "warn", unseen: "warn", unhealthy: "bad" };
const digits = (value) => String(Number(value.toPrecision(3)));
/** "80% of 1,250" */
const share = (part, whole) => (whole > 0 ? `${format.percent(part / whole)} of ${format.count(whole)}` : format.percent(null));

const COLUMNS = [
  ["Running", (worker) => format.count(worker.running)],
  ["Waiting", (worker) => format.count(worker.waiting)],
  ["Cache", (worker) => format.percent(worker.kv_use)],
  ["Depth", (worker) => format.decimal(worker.depth)],
  ["Acceptance", (worker) => format.percent(worker.drafted ? worker.accepted / worker.drafted : null)],
  ["Round trip", (worker) => format.duration(worker.round_trip)],
  ["Drafted ahead", (worker) => (worker.paused_share == null ? share(worker.hits, worker.answers) : `off: ${format.percent(worker.paused_share)}`)],
  ["Late", (worker) => share(worker.late, worker.answers)],
  ["Up", (worker) => (worker.life.started == null ? format.percent(null) : format.age(Date.now() / 1000 - worker.life.started))],
  ["Restarts", (worker) => format.count(worker.life.restarts)],
];

function row(worker) {
  const pill = element("span", { class: `pill ${TONE[worker.state] ?? "warn"}`, textContent: worker.state });
  const pool = worker.pool === worker.role ? worker.pool : `${worker.pool}, ${worker.role}`;
  return element(
    "tr",
    { role: "row" },
    element("th", { scope: "row", role: "rowheader", textContent: worker.name, title: worker.address }),
    element("td", { role: "cell", "data-label": "Pool", textContent: pool }),
    element("td", { role: "cell", "data-label": "State" }, pill),
    ...COLUMNS.map(([label, read]) => element("td", { role: "cell", class: "number", "data-label": label, textContent: read(worker) })),
  );
}

function describeEvent(event) {
  const time = element("time", { dateTime: new Date(1000 * event.time).toISOString(), textContent: new Date(1000 * event.time).toLocaleTimeString() });
  return element("li", { class: event.is_bad ? "bad" : "" }, time, ` ${event.text}`);
}

export function showWorkers(workers, events) {
  byId("events").replaceChildren(...events.slice(-12).reverse().map(describeEvent));
  if (events.length === 0) byId("events").append(element("li", { class: "hint", textContent: "No changes since this page's server started." }));
  byId("worker-table").tBodies[0].replaceChildren(...workers.map(row));
  byId("symptoms").replaceChildren(
    ...workers.filter((worker) => worker.life.last_exit && worker.state !== "ready").map((worker) =>
      element("li", { textContent: `${worker.name} was restarted ${format.count(worker.life.restarts)}×; its last exit: ${worker.life.last_exit}` }),
    ),
    ...workers.flatMap((worker) =>
      worker.symptoms.map((symptom) =>
        element("li", { textContent: `${worker.name}: ${symptom.name.replaceAll("_", " ")}, ${digits(symptom.figure)} (limit ${digits(symptom.limit)}); ${symptom.remedy}` }),
      ),
    ),
  );
}
