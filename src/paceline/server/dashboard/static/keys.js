// Keys of this tab. They live in sessionStorage: closing the tab forgets them.

const API = "paceline.key";
const ADMIN = "paceline.admin-key";

export const apiKey = () => sessionStorage.getItem(API);
export const adminKey = () => sessionStorage.getItem(ADMIN) ?? apiKey();
export const keepAdminKey = (key) => sessionStorage.setItem(ADMIN, key);
export const forgetKeys = () => [API, ADMIN].forEach((name) => sessionStorage.removeItem(name));

let asking = null;

/** Resolves once there is a key. Whoever asks while the dialog is open waits for the same answer. */
export function askKey(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const form = document.getElementById("key-form");
    const input = document.getElementById("api-key");
    document.getElementById("key-reason").textContent = reason;
    input.value = "";
    dialog.oncancel = (event) => event.preventDefault(); // nothing works without a key
    form.addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        sessionStorage.setItem(API, input.value.trim());
        dialog.close();
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}
