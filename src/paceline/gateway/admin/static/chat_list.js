// The list of chats at the side of the playground. On a phone it is a drawer.

import { allChats } from "./chats.js";
import { byId, element } from "./element.js";

const DAY = 86_400_000;

function period(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  return time >= today - 7 * DAY ? "Last week" : "Earlier";
}

/** Shows all chats. `onOpen` and `onRemove` get a chat. */
export function showChatList(current, { onOpen, onRemove }) {
  const place = byId("chat-list");
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.chat : null;
  const parts = [];
  let last = null;
  for (const chat of allChats()) {
    const name = period(chat.updated);
    if (name !== last) parts.push(element("li", { class: "period", textContent: name }));
    last = name;
    parts.push(row(chat, chat.id === current.id, onOpen, onRemove));
  }
  if (parts.length === 0) parts.push(element("li", { class: "period", textContent: "Chats are kept in this browser." }));
  place.replaceChildren(...parts);
  if (focused) place.querySelector(`[data-chat="${focused}"]`)?.focus();
}

function row(chat, isCurrent, onOpen, onRemove) {
  const open = element("button", { type: "button", class: "chat", textContent: chat.title, title: chat.title, "data-chat": chat.id });
  if (isCurrent) open.setAttribute("aria-current", "true");
  open.addEventListener("click", () => onOpen(chat));
  const remove = element("button", { type: "button", class: "icon", "aria-label": `Delete chat: ${chat.title}`, title: "Delete", textContent: "×" });
  remove.addEventListener("click", () => onRemove(chat));
  return element("li", {}, open, remove);
}
