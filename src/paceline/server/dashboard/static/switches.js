// The section Switches: run-time flags, behind the admin key.

import { callAdmin } from "./api.js";
import { byId, element } from "./element.js";
import { keepAdminKey } from "./keys.js";

const PATH = "admin/flags";
const SHOWN = 6;
const NAMES = { enabled: "speculate", method: "method", max_depth: "depth at most" };

let offered = null;
let inForce = null;

function say(text, isBad = false) {
  const note = byId("switches-note");
  note.textContent = text;
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
  const enabled = flags.enabled ?? effective.enabled; // the engine takes a step to follow
  byId("flag-enabled").checked = enabled;
  byId("flag-enabled-note").textContent = `${enabled ? "on" : "off"}${flags.enabled === null ? ", as configured" : ""}`;
  fill(byId("flag-method"), offered.methods, flags.method ?? "", effective.method);
  const depths = Array.from({ length: offered.depths + 1 }, (_, depth) => String(depth));
  fill(byId("flag-depth"), depths, flags.max_depth === null ? "" : String(flags.max_depth), effective.max_depth);
  byId("flag-reset").disabled = Object.values(flags).every((value) => value === null);
  byId("changes").replaceChildren(...history.slice(-SHOWN).reverse().map(change));
  if (history.length === 0) byId("changes").append(element("li", { class: "hint", textContent: "None yet." }));
}

function change({ who, when, changes }) {
  const said = Object.entries(changes).map(([name, value]) => {
    const shown = value === null ? "as configured" : value === true ? "on" : value === false ? "off" : value;
    return `${NAMES[name] ?? name}: ${shown}`;
  });
  const time = element("time", { dateTime: when, textContent: new Date(when).toLocaleString() });
  return element("li", {}, `${said.join(", ")} `, element("span", { class: "who", textContent: `by ${who}, ` }), time);
}

async function ask(options, isUnlocking = false) {
  try {
    show(await (await callAdmin(PATH, options)).json());
    byId("flags").disabled = byId("history").hidden = false;
    byId("unlock").hidden = true;
    say("");
  } catch (error) {
    const isLocked = error.status === 401 || error.status === 403;
    if (isLocked || error.status === 404) byId("flags").disabled = byId("history").hidden = true;
    byId("unlock").hidden = !isLocked;
    if (isLocked) say(isUnlocking ? error.message : "Changing them takes an admin key.", isUnlocking);
    else if (error.status === 404) say("They can be changed on a server that was started with an admin_key or api_keys.");
    else say(error.message, true);
  }
}

const set = (changes) => ask({ method: "PATCH", body: changes });

/** Read the flags again when what is in force is no longer what it was, whoever changed it. */
export function showSwitches({ methods, max_depth: depths, speculation }) {
  const said = JSON.stringify(speculation);
  if (said === inForce) return;
  if (offered === null) listen();
  [offered, inForce] = [{ methods, depths }, said];
  if (byId("flags").disabled) show({ flags: { enabled: null, method: null, max_depth: null }, effective: speculation, history: [] });
  ask();
}

function listen() {
  byId("flag-enabled").addEventListener("change", (event) => set({ enabled: event.target.checked }));
  byId("flag-method").addEventListener("change", (event) => set({ method: event.target.value || null }));
  byId("flag-depth").addEventListener("change", (event) => set({ max_depth: event.target.value === "" ? null : Number(event.target.value) }));
  byId("flag-reset").addEventListener("click", () => set({ enabled: null, method: null, max_depth: null }));
  byId("unlock").addEventListener("submit", (event) => {
    event.preventDefault();
    keepAdminKey(byId("admin-key").value.trim());
    byId("admin-key").value = "";
    ask(undefined, true);
  });
}
