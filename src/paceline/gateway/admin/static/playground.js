// Starts the playground: the conversation, its composer, its chats and its settings.

import { showChatList } from "./chat_list.js";
import { allChats, newChat, openChat, removeChat, saveChat, select } from "./chats.js";
import { startCopying } from "./copy.js";
import { byId } from "./element.js";
import { generate, messagesOf, newAnswer } from "./generate.js";
import { removeKeys, showKeyButton } from "./keys.js";
import { model, readModels } from "./models.js";
import { showSettings, startSettings } from "./settings.js";
import { startPanels } from "./panels.js";
import { Turn } from "./turn.js";

let chat = openChat();
let turns = [];
let running = null; // the controller of the answer or comparison that runs
let isColoured = localStorage.getItem("paceline.colours") === "on";

const conversation = byId("conversation");
const message = byId("message");
const panels = startPanels();

const actions = { again: answerAgain, resume: continueAnswer, compare, new: startChat };
const listActions = { onOpen: show, onRemove: remove };

/** Shows a chat. Another one that is answered now is stopped. */
function show(next) {
  running?.abort();
  chat = select(next);
  turns = chat.turns.map((turn) => new Turn(turn, actions));
  for (const turn of turns) turn.setColoured(isColoured);
  conversation.replaceChildren(...turns.map((turn) => turn.place));
  showSettings(chat.settings);
  showEmpty();
  panels.close();
  scrollToEnd();
  message.focus();
}

function showEmpty() {
  byId("welcome").hidden = turns.length > 0;
  document.title = chat.title ? `${chat.title} · Paceline` : "Paceline";
  showChatList(chat, listActions);
}

function startChat() {
  show(newChat(chat.settings));
}

function remove(removed) {
  if (!confirm(`Delete the chat “${removed.title}”?`)) return;
  removeChat(removed);
  if (removed.id === chat.id) show(allChats()[0] ?? newChat());
  else showChatList(chat, listActions);
}

function send(question) {
  const turn = { question, answer: null };
  chat.turns.push(turn);
  const view = new Turn(turn, actions);
  view.setColoured(isColoured);
  turns.push(view);
  conversation.append(view.place);
  showEmpty();
  answer(view);
  scrollToEnd();
}

/** Generates a new answer to the question of a turn. */
function answer(view) {
  view.turn.answer = newAnswer(chat.settings, model());
  return run(view, messagesOf(chat.settings.system, before(view)));
}

/** The turns before the answer of `view`, with its question. */
const before = (view) => [...chat.turns.slice(0, turns.indexOf(view)), { question: view.turn.question, answer: null }];

function answerAgain(view) {
  if (!running) answer(view);
}

function continueAnswer(view) {
  if (running) return;
  view.turn.answer.limit = view.turn.answer.tokens + chat.settings.maxTokens;
  view.turn.answer.settings.maxTokens = chat.settings.maxTokens;
  const messages = messagesOf(chat.settings.system, before(view));
  run(view, [...messages, { role: "assistant", content: view.turn.answer.text }]);
}

/** Generates the answer of a turn, from what `messages` have of it. */
async function run(view, messages) {
  const { answer } = view.turn;
  const owner = chat;
  await whileRunning(async (signal) => {
    answer.finish = null;
    view.restart();
    saveChat(owner);
    await generate(answer, messages, signal, () => follow(() => view.update()));
    follow(() => view.show());
    if (!saveChat(owner)) byId("announcement").textContent = "This browser has no room to store the chat.";
    else byId("announcement").textContent = answer.finish === "error" ? answer.error.message : "The answer is complete.";
  });
  if (owner === chat) showEmpty();
}

function compare(view) {
  if (running) return;
  const system = chat.settings.system;
  whileRunning((signal) => view.comparison.run(view.turn.answer, messagesOf(system, before(view)), signal));
  view.comparison.place.scrollIntoView({ block: "nearest" });
}

/** Runs a task that the user can stop. */
async function whileRunning(task) {
  const controller = new AbortController();
  running = controller;
  showRunning();
  try {
    await task(controller.signal);
  } finally {
    if (running === controller) running = null;
    showRunning();
  }
}

function showRunning() {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
}

/** Changes the page, and stays at its end if the user was there. */
function follow(change) {
  const place = byId("scroll");
  const isAtEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 60;
  change();
  if (isAtEnd) requestAnimationFrame(scrollToEnd);
}

function scrollToEnd() {
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}

function setColoured(isOn) {
  isColoured = isOn;
  localStorage.setItem("paceline.colours", isOn ? "on" : "off");
  byId("colours").setAttribute("aria-pressed", String(isOn));
  byId("origins").hidden = !isOn;
  follow(() => turns.forEach((turn) => turn.setColoured(isOn)));
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = message.value.trim();
  if (!question || running) return;
  message.value = "";
  send(question);
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (!panels.close()) running?.abort();
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  message.focus();
});
byId("colours").addEventListener("click", () => setColoured(!isColoured));
byId("new-chat").addEventListener("click", startChat);
byId("forget-key").addEventListener("click", () => {
  removeKeys();
  showKeyButton();
});
for (const example of byId("examples").children) example.addEventListener("click", () => !running && send(example.textContent));
startSettings((settings) => {
  chat.settings = settings;
  saveChat(chat, false);
});
startCopying(conversation, (button) => turns.find((turn) => turn.place.contains(button)).turn.answer.text);
setColoured(isColoured);
show(chat);
readModels();
