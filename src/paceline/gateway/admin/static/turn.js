// A question and its answer on the page: the text, what is said about it, and its buttons.

import { Comparison } from "./compare.js";
import { element } from "./element.js";
import * as format from "./format.js";
import { speed } from "./generate.js";
import { MarkdownView } from "./markdown.js";
import { unpackOrigins } from "./origins.js";

const button = (label, properties = {}) => element("button", { type: "button", textContent: label, ...properties });

/** What an error means for a person who chats, by status or code: a text, and the label of the button that helps. */
function explain({ status, code, message }) {
  if (code === "context_length_exceeded") return [`This chat is too long for the model. ${message}`, "new", "New chat"];
  if (status === 401) return ["This server needs an API key.", "again", "Enter a key"];
  if (status === 0) return ["The connection to the server was lost.", "again", "Try again"];
  return [message, "again", "Try again"];
}

export class Turn {
  #frame = 0;

  /** `actions` has the functions again, resume, new and compare; each gets this turn. */
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.isColoured = false;
    this.thought = element("div", { class: "markdown" });
    this.reasoning = element("details", { class: "reasoning", hidden: true }, element("summary"), this.thought);
    this.text = element("div", { class: "markdown" });
    this.notice = element("div", { class: "notice", hidden: true });
    this.footer = element("footer", { class: "actions" });
    this.comparison = new Comparison();
    this.answer = element("div", { class: "answer", role: "group", "aria-label": "Answer" }, this.reasoning, this.text, this.notice, this.footer, this.comparison.place);
    this.place = element("article", { class: "turn" }, element("p", { class: "question", textContent: turn.question }), this.answer);
    this.views = { text: new MarkdownView(this.text), thought: new MarkdownView(this.thought) };
    this.show();
  }

  /** Shows the answer as it is now, at most once for each frame. */
  update() {
    this.#frame ||= requestAnimationFrame(() => this.show());
  }

  setColoured(isColoured) {
    this.isColoured = isColoured;
    this.show();
  }

  show() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { answer } = this.turn;
    this.answer.hidden = !answer;
    if (!answer) return;
    const isRunning = answer.finish === null;
    this.answer.setAttribute("aria-busy", String(isRunning));
    this.answer.classList.toggle("waiting", isRunning && !answer.text && !answer.reasoning);
    this.#showReasoning(answer, isRunning);
    this.views.text.show(answer.text, this.isColoured ? unpackOrigins(answer.origins) : null);
    this.#showNotice(answer);
    if (isRunning) this.footer.replaceChildren();
    else if (this.footer.childElementCount === 0) this.#showFooter(answer);
  }

  #showReasoning(answer, isRunning) {
    this.reasoning.hidden = !answer.reasoning;
    if (!answer.reasoning) return;
    this.reasoning.firstChild.textContent = isRunning && !answer.text ? "Reasoning …" : "Reasoning";
    this.views.thought.show(answer.reasoning);
  }

  #showNotice(answer) {
    const [text, action, label] = this.#noticeOf(answer);
    this.notice.hidden = !text;
    this.notice.classList.toggle("bad", answer.finish === "error");
    if (!text || this.notice.dataset.text === text) return;
    this.notice.dataset.text = text;
    const act = action && button(label);
    act?.addEventListener("click", () => this.actions[action](this));
    this.notice.replaceChildren(element("span", { textContent: text }), ...(act ? [act] : []));
  }

  #noticeOf(answer) {
    if (answer.finish === "error") return explain(answer.error);
    if (answer.finish === "stopped") return [`Stopped after ${format.count(answer.tokens)} tokens.`];
    if (answer.finish !== "length") return [];
    if (answer.tokens < answer.limit) return [`Cut after ${format.count(answer.tokens)} tokens: the context of the model is full.`, "new", "New chat"];
    const text = `Cut at ${format.count(answer.limit)} tokens.`;
    return answer.text ? [text, "resume", "Continue"] : [`${text} The reasoning did not end: raise the limit in the settings.`, "again", "Answer again"];
  }

  #showFooter(answer) {
    const copy = button("Copy", { class: "quiet", "data-copy": "", "aria-label": "Copy answer" });
    const again = button("Answer again", { class: "quiet again" });
    const compare = button(answer.settings.speculation ? "Compare with plain decoding" : "Compare with speculation", { class: "quiet compare" });
    again.addEventListener("click", () => this.actions.again(this));
    compare.addEventListener("click", () => this.actions.compare(this));
    // The seed does not reproduce an answer of several requests, or one that was stopped
    const canCompare = !answer.isContinued && ["stop", "length"].includes(answer.finish);
    this.footer.replaceChildren(...(answer.text ? [copy] : []), again, ...(canCompare ? [compare] : []), element("p", { class: "figures", textContent: summary(answer) }));
  }

  /** Clears what was said about an answer that is generated now. */
  restart() {
    this.footer.replaceChildren();
    this.comparison.clear();
    delete this.notice.dataset.text;
    this.show();
  }
}

/** "112 tokens · 98 tok/s · first after 0.12 s · draft acceptance rate 58% (61 of 105)" */
export function summary(answer) {
  if (answer.tokens === 0) return "";
  const parts = [`${format.count(answer.tokens)} token${answer.tokens === 1 ? "" : "s"}`];
  if (speed(answer) !== null) parts.push(`${format.speed(speed(answer))} tok/s`);
  if (answer.firstToken !== null) parts.push(`first after ${format.duration(answer.firstToken)}`);
  if (!answer.settings.speculation) parts.push("speculation off");
  else if (answer.drafted) parts.push(`draft acceptance rate ${format.percent(answer.accepted / answer.drafted)} (${format.count(answer.accepted)} of ${format.count(answer.drafted)})`);
  else if (answer.rounds) parts.push("no drafts");
  return parts.join(" · ");
}
