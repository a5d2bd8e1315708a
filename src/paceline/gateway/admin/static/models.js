// The model that the page shows. A server with several models has a selection in the bar.

import { call } from "./api.js";
import { byId, element } from "./element.js";
import * as format from "./format.js";

const RETRY_MS = 3000;

let chosen = null;

/** The name of the chosen model; null before the server has named it. */
export const model = () => chosen;

/** Shows the models of a report. `onChange` is called when the user chooses another one. */
export function showModels({ model, models }, onChange = () => {}) {
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

/** Asks the server for its models until it answers, and shows them with the length of the context. */
export async function readModels() {
  for (;;) {
    try {
      const { data } = await (await call("v1/models")).json();
      const showContext = () => {
        const card = data.find(({ id }) => id === chosen);
        byId("context-hint").textContent = `The context has room for ${format.count(card.max_model_len)} tokens.`;
      };
      showModels({ model: data[0].id, models: data.map(({ id }) => id) }, showContext);
      showContext();
      byId("state").hidden = true;
      return;
    } catch (error) {
      byId("state").hidden = false;
      byId("state").textContent = error.status ? error.message : "no connection, retrying";
      if (error.status === 401 || error.status === 403) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}
