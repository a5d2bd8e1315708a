// Calls of the server's API, with the key it wants, and its errors in its own words.

import { adminKey, apiKey, askKey } from "./keys.js";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function send(path, { method = "GET", body, signal }, key) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new ApiError(response.status, said?.error?.message ?? `${method} ${path} answered ${response.status}`);
}

/** A response, once it is a good one. A server that wants another key gets asked about with a dialog. */
export async function call(path, options = {}) {
  for (;;) {
    const key = apiKey();
    try {
      return await send(path, options, key);
    } catch (error) {
      if (error.status !== 401) throw error;
      // While this call was under way somebody may have given a key: try that one first
      if (apiKey() === key) await askKey(key ? error.message : "Enter one that was made for you.");
    }
  }
}

/** The same with the admin key; whoever calls handles a key that is refused. */
export const callAdmin = (path, options = {}) => send(path, options, adminKey());
