// The section Switches: run-time flags, with the admin key.

import { callAdmin } from "./api.js";
import { byId, element } from "./element.js";
import { adminKey, storeAdminKey } from "./keys.js";

const PATH = "admin/flags";
const COMMAND = "PACELINE_ADMIN_KEY=choose-a-key paceline serve";
const MAX_CHANGES = 6;
const NAMES = { enabled: "speculation", method: "method", max_depth: "maximum depth" };

let limits = null;
let lastFlags = null;

function showNote(text, isBad = false, command = "") {
  const note = byId("switches-note");
  note.replaceChildren(text, ...(command ? [" ", element("code", { textContent: command })] : []));
  note.classList.toggle("bad", isBad);
}

function fill(select, choices, chosen, configured) {
  select.replaceChildren(
    element("option", { value: "", textContent: `as configured${chosen === "" ? ` (${configured})` : ""}` }),
    ...choices.map((choice) => element("option", { value: choice, textContent: choice })),
  );
  select.value = chosen;
}

function show({ flags, effective, history }) {
  const enabled = flags.enabled ?? effective.enabled; // the engine applies it with the next step
  byId("flag-enabled").checked = enabled;
  byId("flag-enabled-note").textContent = `${enabled ? "on" : "off"}${flags.enabled === null ? ", as configured" : ""}`;
  fill(byId("flag-method"), limits.methods, flags.method ?? "", effective.method);
  const depths = Array.from({ length: limits.depths + 1 }, (_, depth) => String(depth));
  fill(byId("flag-depth"), depths, flags.max_depth === null ? "" : String(flags.max_depth), effective.max_depth);
  byId("flag-reset").disabled = Object.values(flags).every((value) => value === null);
  byId("changes").replaceChildren(...history.slice(-MAX_CHANGES).reverse().map(describeChange));
  if (history.length === 0) byId("changes").append(element("li", { class: "hint", textContent: "No changes." }));
}

function describeChange({ who, when, changes }) {
  const parts = Object.entries(changes).map(([name, value]) => {
    const text = value === null ? "as configured" : value === true ? "on" : value === false ? "off" : value;
    return `${NAMES[name] ?? name}: ${text}`;
  });
  const time = element("time", { dateTime: when, textContent: new Date(when).toLocaleString() });
  return element("li", {}, `${parts.join(", ")} `, element("span", { class: "who", textContent: `by ${who}, ` }), time);
}

async function send(options, isUnlocking = false) {
  try {
    show(await (await callAdmin(PATH, options)).json());
    byId("flags").disabled = byId("history").hidden = false;
    byId("unlock").hidden = true;
    showNote("");
  } catch (error) {
    if (error.status !== 401 && error.status !== 403) return showNote(error.message, true);
    byId("flags").disabled = byId("history").hidden = true;
    showUnlock(isUnlocking ? error.message : "Changes need an admin key.", isUnlocking);
  }
}

const set = (changes) => send({ method: "PATCH", body: changes });

/** Reads the flags again if the effective flags changed, also by another client. */
export function showSwitches({ methods, max_depth: depths, speculation, has_switches: hasSwitches }) {
  const flags = JSON.stringify(speculation);
  if (flags === lastFlags) return;
  if (limits === null) listen();
  [limits, lastFlags] = [{ methods, depths }, flags];
  if (byId("flags").disabled) show({ flags: { enabled: null, method: null, max_depth: null }, effective: speculation, history: [] });
  // A request that must fail would be an error in the console
  if (!hasSwitches) showLocked();
  else if (adminKey() === null) showUnlock("Changes need an admin key.");
  else send();
}

function showLocked() {
  showNote("The switches are locked. To use them, start the server with an admin key:", false, COMMAND);
}

function showUnlock(text, isBad = false) {
  byId("unlock").hidden = false;
  showNote(text, isBad);
}

function listen() {
  byId("flag-enabled").addEventListener("change", (event) => set({ enabled: event.target.checked }));
  byId("flag-method").addEventListener("change", (event) => set({ method: event.target.value || null }));
  byId("flag-depth").addEventListener("change", (event) => set({ max_depth: event.target.value === "" ? null : Number(event.target.value) }));
  byId("flag-reset").addEventListener("click", () => set({ enabled: null, method: null, max_depth: null }));
  byId("unlock").addEventListener("submit", (event) => {
    event.preventDefault();
    storeAdminKey(byId("admin-key").value.trim());
    byId("admin-key").value = "";
    send(undefined, true);
  });
}
