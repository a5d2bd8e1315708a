// API keys of this tab, in sessionStorage: closing the tab removes them.

import { byId } from "./element.js";

const API = "paceline.key";
const ADMIN = "paceline.admin-key";

export const apiKey = () => sessionStorage.getItem(API);
export const adminKey = () => sessionStorage.getItem(ADMIN) ?? apiKey();
export const storeAdminKey = (key) => sessionStorage.setItem(ADMIN, key);
export const removeKeys = () => [API, ADMIN].forEach((name) => sessionStorage.removeItem(name));

/** The button that removes the key is there while the tab has one. */
export const showKeyButton = () => (byId("forget-key").hidden = apiKey() === null);

let pending = null;

/** Asks for a key. Resolves to false if the user enters none. Calls during an open dialog share it. */
export function requestKey(reason) {
  pending ??= new Promise((resolve) => {
    const [dialog, form, input] = [byId("key-dialog"), byId("key-form"), byId("api-key")];
    byId("key-reason").textContent = reason;
    input.value = "";
    const end = (isGiven) => {
      if (isGiven) sessionStorage.setItem(API, input.value.trim());
      pending = null;
      showKeyButton();
      resolve(isGiven);
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      dialog.close("given");
    };
    byId("key-cancel").onclick = () => dialog.close("");
    dialog.onclose = () => end(dialog.returnValue === "given"); // also after Escape
    dialog.returnValue = "";
    dialog.showModal();
  });
  return pending;
}
