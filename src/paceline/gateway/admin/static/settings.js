// The settings of a chat: system prompt, sampling, limit and speculation.

import { DEFAULTS } from "./chats.js";
import { byId } from "./element.js";

const NUMBERS = { temperature: "temperature", topP: "top-p", maxTokens: "max-tokens", seed: "seed" };

const readNumber = (input) => (input.value.trim() === "" || !input.validity.valid ? null : Number(input.value));

/** Fills the panel from `settings`. */
export function showSettings(settings) {
  byId("system").value = settings.system;
  for (const [name, id] of Object.entries(NUMBERS)) byId(id).value = settings[name] ?? "";
  byId("speculation").checked = settings.speculation;
  showChanged(settings);
}

/** A dot at the button says that a chat has other settings than a new one. */
function showChanged(settings) {
  const isChanged = Object.keys(DEFAULTS).some((name) => settings[name] !== DEFAULTS[name]);
  byId("toggle-settings").classList.toggle("changed", isChanged);
  byId("reset-settings").disabled = !isChanged;
}

/** `onChange` gets the new settings whenever the user changes a valid value. */
export function startSettings(onChange) {
  const read = () => {
    const settings = { system: byId("system").value, speculation: byId("speculation").checked };
    for (const [name, id] of Object.entries(NUMBERS)) settings[name] = readNumber(byId(id));
    settings.maxTokens ??= DEFAULTS.maxTokens;
    showChanged(settings);
    onChange(settings);
  };
  byId("settings").addEventListener("input", read);
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  byId("reset-settings").addEventListener("click", () => {
    showSettings(DEFAULTS);
    read();
  });
}
