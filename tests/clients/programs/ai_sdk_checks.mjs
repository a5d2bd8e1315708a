// Vercel's AI SDK with its providers openai-compatible, openai and anthropic, and openai for Node. As checks.py.
// The packages lie in the folder of the environment variable NODE_PACKAGES.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.env.NODE_PACKAGES}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, tool, Output, isStepCount } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");
const { default: OpenAI } = await load("openai");

const [url, model, ...kinds] = process.argv.slice(2);
const question = "What is the capital of France? Answer in one sentence.";
const weatherQuestion = "What is the weather in Rome now? Use the tool get_weather, then tell me.";
const cityQuestion = "Name a large city of Italy, and its country.";
const checks = [];
const check = (kind, name, run) => checks.push([kind, name, run]);

class ModelFault extends Error {}

function sameText(first, second) {
  if (!first) throw new Error("the answer is empty");
  if (first !== second) throw new Error(`the texts differ: ${JSON.stringify([first, second])}`);
}

function called(names) {
  if (names.length === 0) throw new ModelFault("the model answers without a call");
  if (names.some((name) => name !== "get_weather")) throw new ModelFault(`the model calls ${names}`);
}

function told(text) {
  if (!text) throw new ModelFault("the model calls the tool again in place of an answer");
  if (!text.includes("17")) throw new ModelFault(`the model does not use the result: ${JSON.stringify(text.slice(0, 80))}`);
}

const providers = {
  "openai-compatible": () =>
    createOpenAICompatible({ name: "paceline", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true })(model),
  "openai, chat": () => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).chat(model),
  "openai, responses": () => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).responses(model),
  anthropic: () => createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model),
};
const settings = { temperature: 0, maxOutputTokens: 128, maxRetries: 0 };
const tools = {
  get_weather: tool({
    description: "The weather in a city now.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `sunny, 17 degrees in ${city}`,
  }),
};

for (const [name, make] of Object.entries(providers)) {
  check("text", `${name}: generateText, streamText`, async () => {
    const options = { ...settings, model: make(), prompt: question, maxOutputTokens: 64 };
    const { text } = await generateText(options);
    sameText(text, await streamText(options).text);
  });
  check("tools", `${name}: streamed tools, two turns`, async () => {
    const result = streamText({ ...settings, model: make(), prompt: weatherQuestion, tools, stopWhen: isStepCount(4) });
    const steps = await result.steps;
    called(steps.flatMap((step) => step.toolCalls.map((call) => call.toolName)));
    told(await result.text);
  });
}

check("schema", "openai-compatible: Output.object", async () => {
  const output = Output.object({ schema: z.object({ city: z.string(), country: z.string() }) });
  const result = await generateText({ ...settings, model: providers["openai-compatible"](), prompt: cityQuestion, output });
  if (typeof result.output.city !== "string") throw new Error(JSON.stringify(result.output));
});

check("text", "openai for Node: chat, stream", async () => {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const body = { model, messages: [{ role: "user", content: question }], temperature: 0, max_tokens: 64 };
  const { choices } = await client.chat.completions.create(body);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  sameText(choices[0].message.content, text);
});

check("tools", "openai for Node: runTools", async () => {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  let calls = 0;
  const get_weather = ({ city }) => (calls++, `sunny, 17 degrees in ${city}`);
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const definition = { name: "get_weather", description: "The weather in a city now.", parameters };
  const runner = client.chat.completions.runTools({
    model,
    messages: [{ role: "user", content: weatherQuestion }],
    tools: [{ type: "function", function: { ...definition, function: get_weather, parse: JSON.parse } }],
    temperature: 0,
  });
  const text = await runner.finalContent();
  called(calls ? ["get_weather"] : []);
  told(text ?? "");
});

const found = {};
for (const [kind, name, run] of checks) {
  if (!kinds.includes(kind)) continue;
  try {
    await run();
    found[name] = "";
  } catch (error) {
    if (!(error instanceof ModelFault)) console.error(error);
    found[name] = `${error.constructor.name}: ${error.message}`.slice(0, 400);
  }
}
console.log(JSON.stringify(found));
