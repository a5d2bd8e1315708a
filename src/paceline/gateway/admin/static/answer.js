// One answer on the page: its tokens, coloured by origin, and its speed.

import { call, events } from "./api.js";
import { element } from "./element.js";
import * as format from "./format.js";

/** Plain words for the origins of tokens. */
export const LABELS = { accepted: "guessed", recovered: "corrected", bonus: "extra", plain: "not guessed" };

export class Answer {
  /** `kind` is speculative or plain. */
  constructor(kind, title) {
    this.kind = kind;
    this.title = title;
    this.text = "";
    this.speed = null;
    this.drafted = 0;
    this.figure = element("b", { textContent: "–" });
    this.fill = element("i");
    this.body = element("div", { class: "text", tabIndex: 0, role: "group", "aria-label": "Text" });
    this.detail = element("p", { class: "hint detail" });
    this.place = element(
      "article",
      { class: `answer ${kind}`, "aria-label": `${title} answer`, "aria-busy": "true" },
      element("header", {}, element("h3", { textContent: title }), element("span", { class: "speed" }, this.figure, " tok/s")),
      element("div", { class: "meter", "aria-hidden": "true" }, this.fill),
      this.body,
      this.detail,
    );
    this.counts = { accepted: 0, recovered: 0, bonus: 0, plain: 0 };
    this.tokens = 0;
  }

  /** Streams the answer to `body` and calls `onSpeed` for every chunk. Shows errors, then throws them. */
  async stream(body, signal, onSpeed) {
    const started = performance.now();
    let first = null;
    let firstTokens = 0;
    let metrics = null;
    try {
      const options = { method: "POST", signal, body: { ...body, stream: true, stream_options: { include_origins: true } } };
      for await (const chunk of events(await call("v1/chat/completions", options))) {
        if (chunk.error) throw new Error(chunk.error.message);
        const now = performance.now();
        this.#add(chunk.choices[0]?.origins ?? []);
        metrics = chunk.metrics ?? metrics;
        if (first === null) [first, firstTokens] = [now, this.tokens];
        else if (now > first) {
          // Decode speed only: the time to first token contains the prefill
          this.speed = (1000 * (this.tokens - firstTokens)) / (now - first);
          this.figure.textContent = format.speed(this.speed);
          onSpeed();
        }
      }
    } catch (error) {
      const isStopped = error.name === "AbortError";
      this.detail.append(element("span", { class: isStopped ? "" : "failure", textContent: isStopped ? "Stopped." : error.message }));
      throw error;
    } finally {
      this.place.setAttribute("aria-busy", "false");
    }
    this.drafted = metrics?.speculative_decoding.num_draft_tokens ?? 0;
    this.detail.textContent = this.#summary(metrics, first === null ? null : (first - started) / 1000);
  }

  /** `maximum` is the speed that fills the meter. */
  fillMeter(maximum) {
    this.fill.style.width = `${maximum ? Math.round((100 * (this.speed ?? 0)) / maximum) : 0}%`;
  }

  #add(pieces) {
    const isAtEnd = this.body.scrollHeight - this.body.scrollTop - this.body.clientHeight < 24; // do not scroll while the user reads
    for (const { text, origin } of pieces) {
      this.tokens += 1;
      this.counts[origin] += 1;
      this.text += text;
      if (text) this.body.append(element("span", { class: origin, textContent: text }));
    }
    if (isAtEnd) this.body.scrollTop = this.body.scrollHeight;
  }

  #summary(metrics, ttft) {
    const parts = [`${this.tokens} tokens`, `first token after ${format.duration(ttft)}`];
    if (this.drafted) {
      parts.push(`${format.decimal(this.tokens / metrics.num_rounds, 2)} tokens a round`);
      const { num_accepted_draft_tokens: accepted, draft_acceptance_rate: rate } = metrics.speculative_decoding;
      parts.push(`draft acceptance rate ${format.percent(rate)} (${accepted} of ${this.drafted})`);
      parts.push(Object.entries(this.counts).filter(([, n]) => n).map(([origin, n]) => `${n} ${LABELS[origin]}`).join(", "));
    } else if (this.kind === "speculative") {
      parts.push("no guesses were made");
    }
    return parts.join(" · ");
  }
}
