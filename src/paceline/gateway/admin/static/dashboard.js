// Starts the dashboard: polls the overview and updates all sections.

import { call } from "./api.js";
import { byId } from "./element.js";
import { History } from "./history.js";
import { removeKeys, showKeyButton } from "./keys.js";
import { showMissing } from "./missing.js";
import { model, showModels } from "./models.js";
import { showSwitches } from "./switches.js";
import { showTraffic } from "./traffic.js";
import { showWorkers } from "./workers.js";

const METRIC_SECTIONS = ["traffic", "workers", "switches"];
let history = new History();
let since = 0;

const INTERVAL = 1000;
const visible = () =>
  new Promise((resolve) => {
    if (!document.hidden) return resolve();
    document.addEventListener("visibilitychange", resolve, { once: true });
  });

/** Requests the overview once a second while the page is visible. Stops if the key has no access. */
async function poll(onReport, onError) {
  for (;;) {
    await visible();
    try {
      const name = model();
      const query = new URLSearchParams({ since, ...(name === null ? {} : { model: name }) });
      const report = await (await call(`v1/paceline/overview?${query}`)).json();
      if (name !== model()) continue; // the user chose another model meanwhile
      since = report.samples.at(-1)?.time ?? since;
      onReport(report);
    } catch (error) {
      onError(error);
      if (error.status === 403 || error.status === 401) return;
    }
    await new Promise((resolve) => setTimeout(resolve, INTERVAL));
  }
}

function showState(text, tone) {
  const place = byId("state");
  if (place.textContent !== text) place.textContent = text;
  place.className = `state ${tone}`;
  showKeyButton();
}

function startAgain() {
  history = new History();
  since = 0;
}

function showReport(report) {
  history.add(report.samples);
  showModels(report, startAgain);
  const isReady = report.workers.some((worker) => worker.role === "target" && worker.state === "ready");
  const drafts = report.drafts_last_minute;
  const speculation = report.speculation.enabled ? `speculation on, ${drafts} draft${drafts === 1 ? "" : "s"} in the last minute` : "speculation off";
  showState(isReady ? speculation : "not ready", isReady ? "good" : "bad");
  showTraffic(report, history);
  showMissing(report);
  showWorkers(report.workers, report.events);
  showSwitches(report);
}

function showError(error) {
  if (error.status === 403) {
    for (const id of METRIC_SECTIONS) byId(id).hidden = true;
    showState("this key has no access to metrics", "");
  } else if (error.status === 401) {
    showState("needs an API key: reload this page", "bad");
  } else {
    showState(error.status ? error.message : "no connection, retrying", "bad");
  }
}

byId("forget-key").addEventListener("click", () => {
  removeKeys();
  location.reload();
});
// A phone has no room for all charts at once
if (matchMedia("(max-width: 40rem)").matches) byId("charts").open = false;
poll(showReport, showError);
