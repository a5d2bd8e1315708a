// The section Playground: a chat. Every answer is generated with speculation, then without.

import { Answer } from "./answer.js";
import { byId, element } from "./element.js";
import * as format from "./format.js";

let messages = [];
let running = null;

const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

function body(conversation, seed, isSpeculative) {
  return {
    messages: conversation,
    seed,
    temperature: Number(byId("temperature").value),
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
  const verdict = element("p", { class: "verdict", role: "status" });
  const place = element(
    "div",
    { class: "turn" },
    element("p", { class: "question", textContent: question }),
    element("div", { class: "answers" }, ...answers.map((answer) => answer.place)),
    verdict,
  );
  byId("conversation").append(place);
  place.scrollIntoView({ block: "nearest" });
  const conversation = messages; // a new chat replaces `messages`
  conversation.push({ role: "user", content: question });
  setRunning(controller);
  const meters = () => {
    const fastest = Math.max(...answers.map((answer) => answer.speed ?? 0));
    answers.forEach((answer) => answer.fillMeter(fastest));
  };
  try {
    for (const answer of answers) {
      await answer.stream(body(conversation, seed, answer === answers[0]), controller.signal, meters);
    }
    compare(verdict, ...answers);
  } catch {
    // the answer shows the error
  } finally {
    if (answers[0].text) conversation.push({ role: "assistant", content: answers[0].text });
    else conversation.pop();
    setRunning(null);
    byId("message").focus();
  }
}

function compare(verdict, speculative, plain) {
  const announce = (text) => (byId("announcement").textContent = text);
  if (!plain) return announce(`Answered at ${format.speed(speculative.speed)} tokens per second.`);
  const isSame = speculative.text === plain.text;
  const ratio = speculative.speed && plain.speed ? `${format.decimal(speculative.speed / plain.speed, 2)}× the speed of plain, ` : "";
  verdict.textContent = `${ratio}${isSame ? "and the same text" : "but the text differs"}`;
  verdict.classList.add(isSame ? "good" : "bad");
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
