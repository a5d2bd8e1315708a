// Requests to the server's API, with keys, errors and event streams.

import { adminKey, apiKey, requestKey } from "./keys.js";

export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function send(path, { method = "GET", body, signal }, key) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  if (response.ok) return response;
  const content = await response.json().catch(() => null);
  throw new ApiError(response.status, content?.error?.message ?? `${method} ${path} returned ${response.status}`, content?.error?.code);
}

/** The response of a successful request. If the server rejects the key, a dialog asks for another one; without it the error is
 * thrown. */
export async function call(path, options = {}) {
  for (;;) {
    const key = apiKey();
    try {
      return await send(path, options, key);
    } catch (error) {
      if (error.status !== 401) throw error;
      // The user may have entered a key during this request: try it first
      if (apiKey() === key && !(await requestKey(key ? error.message : "Enter your API key."))) throw error;
    }
  }
}

/** The same with the admin key. The caller handles a rejected key. */
export const callAdmin = (path, options = {}) => send(path, options, adminKey());

/** Yields the data of every server-sent event of a response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // leaving early cancels the request
  }
}
