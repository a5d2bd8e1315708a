// Wires the page together.

import { byId } from "./element.js";
import { History } from "./history.js";
import { apiKey, forgetKeys } from "./keys.js";
import { startPlayground } from "./playground.js";
import { poll } from "./poller.js";
import { showSwitches } from "./switches.js";
import { showTraffic } from "./traffic.js";
import { showWorkers } from "./workers.js";

const FIGURES = ["traffic", "workers", "switches"];
const history = new History();

function state(text, tone) {
  const place = byId("state");
  if (place.textContent !== text) place.textContent = text;
  place.className = `state ${tone}`;
  byId("forget-key").hidden = apiKey() === null;
}

function heard(report) {
  history.add(report.samples);
  byId("model").textContent = report.model;
  const isUp = report.workers.some((worker) => worker.role === "target" && worker.state === "ready");
  const speculation = report.speculation.enabled ? `speculating, ${report.speculation.method}` : "speculation off";
  state(isUp ? speculation : "not ready", isUp ? "good" : "bad");
  showTraffic(report, history);
  showWorkers(report.workers);
  showSwitches(report);
}

function failed(error) {
  if (error.status === 403) {
    for (const id of FIGURES) byId(id).hidden = true;
    state("this key may chat, and see no figures", "");
  } else {
    state(error.status ? error.message : "no connection, trying again", "bad");
  }
}

byId("forget-key").addEventListener("click", () => {
  forgetKeys();
  location.reload();
});
startPlayground();
poll(heard, failed);
