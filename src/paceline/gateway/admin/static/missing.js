// Names what this server could show and was not configured to do, with the way to configure it.

import { byId, element } from "./element.js";

const PARTS = [
  [({ workers }) => workers.some((worker) => worker.role === "draft"), "Draft workers", "the engine drafts; a pool of draft workers is in a cluster file", "paceline serve --config cluster.yaml"],
  [(report) => report.dollars_per_hour != null, "Cost", "the price of this machine", "paceline serve --price 2.69"],
  [(report) => report.has_switches, "Switches and planner", "an admin key", "PACELINE_ADMIN_KEY=choose-a-key paceline serve"],
];

let shown = null;

export function showMissing(report) {
  const missing = PARTS.filter(([isThere]) => !isThere(report));
  const names = missing.map(([, name]) => name).join();
  if (names === shown) return;
  shown = names;
  byId("missing").hidden = missing.length === 0;
  byId("missing").lastElementChild.replaceChildren(
    ...missing.map(([, name, text, command]) => element("li", {}, element("b", { textContent: name }), `: ${text}, `, element("code", { textContent: command }))),
  );
}
