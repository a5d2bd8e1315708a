// The panels of the playground: chats on the left, settings on the right. On a phone a panel covers the page.

import { byId } from "./element.js";

const PANELS = { chats: "toggle-chats", settings: "toggle-settings" };
const isPhone = () => matchMedia("(max-width: 52rem)").matches;

/** Serves the buttons of the panels. Returns `close`, which closes an open panel and says whether there was one. */
export function startPanels() {
  const isOpen = (name) => byId(name).classList.contains("open");
  const set = (name, open) => {
    byId(name).classList.toggle("open", open);
    byId(PANELS[name]).setAttribute("aria-expanded", String(open));
    byId("main").inert = isPhone() && Object.keys(PANELS).some(isOpen);
  };
  const close = () => {
    const open = Object.keys(PANELS).filter(isOpen);
    for (const name of open) {
      set(name, false);
      byId(PANELS[name]).focus();
    }
    return open.length > 0;
  };
  for (const [name, button] of Object.entries(PANELS)) {
    byId(button).addEventListener("click", () => {
      if (isOpen(name)) return close();
      close();
      set(name, true);
      byId(name).querySelector("button, textarea, input").focus();
    });
    byId(name).querySelector(".close").addEventListener("click", close);
  }
  return { close };
}
