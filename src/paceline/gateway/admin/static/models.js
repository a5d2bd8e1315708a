// The model that the page shows. A server with several models has a selection in the bar.

import { byId, element } from "./element.js";

let chosen = null;

/** The name of the chosen model; null before the first report. */
export const model = () => chosen;

/** Shows the models of a report. `onChange` is called when the user chooses another one. */
export function showModels({ model, models }, onChange) {
  const select = byId("models");
  const isSingle = models.length === 1;
  byId("model").hidden = !isSingle;
  select.hidden = isSingle;
  if (chosen !== null) return;
  chosen = model;
  byId("model").textContent = model;
  select.replaceChildren(...models.map((name) => element("option", { value: name, textContent: name })));
  select.value = model;
  select.addEventListener("change", () => {
    chosen = select.value;
    onChange();
  });
}
