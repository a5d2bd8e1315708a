// Generates answers with the chat API. An answer is a plain value, so that a chat can be stored at any time.

import { call, events } from "./api.js";
import { packOrigins } from "./origins.js";

export const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

/** An answer without text. `settings` are those of its request; it keeps them and its seed for a comparison. */
export const newAnswer = (settings, model) => ({
  text: "", reasoning: "", origins: "", // see origins.js
  settings: { ...settings, seed: settings.seed ?? randomSeed() },
  model, fingerprint: null, isContinued: false,
  limit: settings.maxTokens,
  finish: null, // null while it is generated, then stop, length, stopped or error
  error: null, // {status, code, message}
  tokens: 0, firstToken: null, decodeTokens: 0, decodeSeconds: 0,
  rounds: 0, drafted: 0, accepted: 0,
});

/** Tokens per second after the first token. Null if they were too few. */
export const speed = (answer) => (answer.decodeSeconds > 0 ? answer.decodeTokens / answer.decodeSeconds : null);

/** The messages of a request. `turns` are those before and with the question; an answer is sent without its reasoning. */
export function messagesOf(system, turns) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const { question, answer } of turns) {
    messages.push({ role: "user", content: question });
    if (answer?.text) messages.push({ role: "assistant", content: answer.text });
  }
  return messages;
}

function body(answer, messages, isContinuing) {
  const { temperature, topP, maxTokens, seed, speculation } = answer.settings;
  return {
    ...(answer.model === null ? {} : { model: answer.model }),
    messages,
    temperature,
    top_p: topP,
    seed: isContinuing ? randomSeed() : seed, // the noise of the first part is used
    max_completion_tokens: maxTokens,
    speculation: { enabled: speculation },
    stream: true,
    stream_options: { include_origins: true, include_usage: true },
    ...(isContinuing ? { continue_final_message: true, add_generation_prompt: false } : {}),
  };
}

/** Generates `answer` to `messages`, whose last one is the answer so far if it is continued. Calls `onChange` for every chunk. */
export async function generate(answer, messages, signal, onChange) {
  const isContinuing = messages.at(-1).role === "assistant";
  const { text: before, origins: originsBefore, tokens: tokensBefore } = answer;
  Object.assign(answer, { finish: null, error: null, isContinued: isContinuing });
  const started = performance.now();
  const pieces = [];
  let text = "";
  let times = null; // of the first and the last chunk with tokens
  const finish = (reason, error = null) => Object.assign(answer, { finish: reason, error });
  try {
    let reason = null;
    const options = { method: "POST", signal, body: body(answer, messages, isContinuing) };
    for await (const chunk of events(await call("v1/chat/completions", options))) {
      if (chunk.error) throw Object.assign(new Error(chunk.error.message), { code: chunk.error.code, status: 500 });
      const choice = chunk.choices[0];
      if (choice) {
        const now = performance.now();
        pieces.push(...choice.origins);
        text += choice.delta.content ?? "";
        answer.text = before + text;
        answer.origins = originsBefore + packOrigins(pieces, text);
        answer.reasoning += choice.delta.reasoning ?? "";
        answer.tokens = tokensBefore + pieces.length;
        times ??= { first: now, count: pieces.length };
        Object.assign(times, { last: now, total: pieces.length });
        reason = choice.finish_reason ?? reason;
      }
      answer.fingerprint = chunk.system_fingerprint ?? answer.fingerprint;
      if (chunk.metrics) addMetrics(answer, chunk, tokensBefore);
      onChange();
    }
    if (reason === null) throw new TypeError("the stream ended early");
    finish(reason);
  } catch (error) {
    if (error.name === "AbortError") finish("stopped");
    else finish("error", { status: error.status ?? 0, code: error.code ?? null, message: error.message });
  } finally {
    if (times) {
      answer.firstToken ??= (times.first - started) / 1000;
      answer.decodeTokens += times.total - times.count; // the time to the first token contains the prefill
      answer.decodeSeconds += (times.last - times.first) / 1000;
    }
    onChange();
  }
}

function addMetrics(answer, { usage, metrics }, tokensBefore) {
  answer.tokens = tokensBefore + usage.completion_tokens;
  answer.rounds += metrics.num_rounds;
  answer.drafted += metrics.speculative_decoding.num_draft_tokens;
  answer.accepted += metrics.speculative_decoding.num_accepted_draft_tokens;
}
