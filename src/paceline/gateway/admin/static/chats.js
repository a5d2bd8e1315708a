// The chats of this browser, in localStorage: one entry for each chat, and its settings with it.

const PREFIX = "paceline.chat.";
const CURRENT = "paceline.current";

/** What a new chat starts with. Null: as the server recommends. `seed` null: a new one for each answer. */
export const DEFAULTS = Object.freeze({ system: "", temperature: null, topP: null, maxTokens: 1024, seed: null, speculation: true });

const chats = new Map();
for (const key of Object.keys(localStorage)) {
  if (!key.startsWith(PREFIX)) continue;
  try {
    const chat = JSON.parse(localStorage.getItem(key));
    if (Array.isArray(chat.turns)) chats.set(chat.id, { ...chat, settings: { ...DEFAULTS, ...chat.settings } });
  } catch {
    localStorage.removeItem(key); // no chat of this page
  }
}

/** All chats with messages, the last used first. */
export const allChats = () => [...chats.values()].sort((a, b) => b.updated - a.updated);

/** The chat that was open last, or a new one. */
export function openChat() {
  const chat = chats.get(localStorage.getItem(CURRENT)) ?? newChat();
  return select(chat);
}

/** A chat without messages. It is stored with its first message. */
export function newChat(settings = DEFAULTS) {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", updated: Date.now(), settings: { ...settings }, turns: [] };
}

export function select(chat) {
  store(CURRENT, chat.id);
  return chat;
}

/** Stores a chat. Returns false if the browser has no room, even without the oldest chats. */
export function saveChat(chat, isUsed = true) {
  if (chat.turns.length === 0) return true;
  if (isUsed) chat.updated = Date.now();
  chat.title ||= chat.turns[0].question.replace(/\s+/g, " ").slice(0, 80);
  chats.set(chat.id, chat);
  const text = JSON.stringify(chat);
  while (!store(PREFIX + chat.id, text)) {
    const oldest = allChats().findLast((other) => other.id !== chat.id);
    if (!oldest) return false;
    removeChat(oldest);
  }
  return true;
}

export function removeChat(chat) {
  chats.delete(chat.id);
  localStorage.removeItem(PREFIX + chat.id);
}

/** Returns false if the browser has no room, or stores nothing. */
function store(key, value) {
  try {
    localStorage.setItem(key, value);
    return true;
  } catch {
    return false;
  }
}
