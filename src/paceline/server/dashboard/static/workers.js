// The section Pools and workers.

import { byId, element } from "./element.js";
import * as format from "./format.js";

const TONE = { ready: "good", starting: "warn", suspected: "warn", unseen: "warn", unhealthy: "bad" };
const digits = (value) => String(Number(value.toPrecision(3)));
const ratio = (part, whole) => (whole > 0 ? part / whole : null);

const COLUMNS = [
  ["Running", (worker) => format.count(worker.running)],
  ["Waiting", (worker) => format.count(worker.waiting)],
  ["Cache", (worker) => format.percent(worker.kv_use)],
  ["Depth", (worker) => format.decimal(worker.depth)],
  ["Alpha", (worker) => format.percent(worker.alpha)],
  ["Round trip", (worker) => format.duration(worker.round_trip)],
  ["Ahead", (worker) => (worker.paused_share == null ? format.percent(ratio(worker.hits, worker.answers)) : `off: ${format.percent(worker.paused_share)}`)],
  ["Late", (worker) => format.percent(ratio(worker.late, worker.answers))],
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

export function showWorkers(workers) {
  byId("worker-table").tBodies[0].replaceChildren(...workers.map(row));
  byId("symptoms").replaceChildren(
    ...workers.flatMap((worker) =>
      worker.symptoms.map((symptom) =>
        element("li", { textContent: `${worker.name}: ${symptom.name.replaceAll("_", " ")}, ${digits(symptom.figure)} (limit ${digits(symptom.limit)}); ${symptom.remedy}` }),
      ),
    ),
  );
}
