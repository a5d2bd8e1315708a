// API keys of this tab, in sessionStorage: closing the tab removes them.

const API = "paceline.key";
const ADMIN = "paceline.admin-key";

export const apiKey = () => sessionStorage.getItem(API);
export const adminKey = () => sessionStorage.getItem(ADMIN) ?? apiKey();
export const storeAdminKey = (key) => sessionStorage.setItem(ADMIN, key);
export const removeKeys = () => [API, ADMIN].forEach((name) => sessionStorage.removeItem(name));

let pending = null;

/** Resolves when the user has entered a key. Calls during an open dialog share it. */
export function requestKey(reason) {
  pending ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const form = document.getElementById("key-form");
    const input = document.getElementById("api-key");
    document.getElementById("key-reason").textContent = reason;
    input.value = "";
    dialog.oncancel = (event) => event.preventDefault(); // the page needs a key
    form.addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        sessionStorage.setItem(API, input.value.trim());
        dialog.close();
        pending = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
  });
  return pending;
}
