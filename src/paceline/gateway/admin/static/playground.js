// The section Playground: a chat. Every answer is generated with speculation, then without.

import { Answer } from "./answer.js";
import { byId, element } from "./element.js";
import * as format from "./format.js";
import { model } from "./models.js";
import { RUNS, verdict } from "./verdict.js";

let messages = [];
let running = null;

const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

function body(conversation, seed, isSpeculative) {
  const temperature = byId("temperature").value;
  return {
    ...(model() === null ? {} : { model: model() }),
    messages: conversation,
    seed,
    temperature: temperature === "" ? null : Number(temperature), // null: as the server recommends
    max_completion_tokens: Number(byId("max-tokens").value),
    speculation: { enabled: isSpeculative },
  };
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = controller !== null;
  byId("stop").hidden = controller === null;
}

/** Generates the two answers one after the other: in one batch they would share the steps and have no speed of their own. */
async function turn(question) {
  const controller = new AbortController();
  const seed = randomSeed();
  const answers = [new Answer("speculative", "Speculative")];
  if (byId("compare").checked) answers.push(new Answer("plain", "Plain"));
  const line = element("p", { class: "verdict", role: "status" });
  const place = element(
    "div",
    { class: "turn" },
    element("p", { class: "question", textContent: question }),
    element("div", { class: "answers" }, ...answers.map((answer) => answer.place)),
    line,
  );
  byId("conversation").append(place);
  place.scrollIntoView({ block: "nearest" });
  const conversation = messages; // a new chat replaces `messages`
  const length = conversation.push({ role: "user", content: question });
  setRunning(controller);
  const meters = () => {
    const fastest = Math.max(...answers.map((answer) => answer.speed ?? 0));
    answers.forEach((answer) => answer.fillMeter(fastest));
  };
  try {
    const request = (answer) => body(conversation.slice(0, length), seed, answer === answers[0]);
    for (const answer of answers) await answer.stream(request(answer), controller.signal, meters);
    byId("message").focus();
    await compare(line, answers, request, controller.signal);
  } catch {
    // the answer shows the error
  } finally {
    if (answers[0].text) conversation.push({ role: "assistant", content: answers[0].text });
    else conversation.pop();
    setRunning(null);
  }
}

/** Repeats both answers, without showing them, until their speeds can be compared. */
async function compare(line, [speculative, plain], request, signal) {
  if (!plain) {
    byId("announcement").textContent = `Answered at ${format.speed(speculative.speed)} tokens per second.`;
    return;
  }
  const speeds = { speculative: [speculative.speed], plain: [plain.speed] };
  const state = { isSame: speculative.text === plain.text, drafted: speculative.drafted, ...speeds };
  show(line, verdict(state));
  if (!state.isSame || !state.drafted || speculative.speed === null) return;
  for (let run = 1; run < RUNS; run += 1) {
    for (const [name, shown] of [["speculative", speculative], ["plain", plain]]) {
      const again = new Answer(name, shown.title);
      await again.stream(request(shown), signal, () => {});
      state[name].push(again.speed);
      state.isSame &&= again.text === shown.text;
    }
    show(line, verdict(state));
  }
}

function show(line, { text, tone }) {
  line.textContent = text;
  line.className = `verdict ${tone}`;
}

export function startPlayground() {
  const message = byId("message");
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const question = message.value.trim();
    if (!question || running) return;
    message.value = "";
    turn(question);
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("reset").addEventListener("click", () => {
    running?.abort();
    messages = [];
    byId("conversation").replaceChildren();
    message.focus();
  });
  for (const example of byId("examples").children) {
    example.addEventListener("click", () => {
      message.value = example.textContent;
      message.focus();
    });
  }
}
