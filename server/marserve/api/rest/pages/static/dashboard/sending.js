// Sends an archive into the model store, with progress, and orders a registration. No markup.

import { isKeyWanted, segment, urlOf, withKey } from "../calls.js";

// A larger file's digest is not computed first: the browser can only do that with all of it in memory.
const MOST_DIGESTED = 256 * 1024 * 1024;

// What the server said against it; `status` is missing where it said nothing. `requestId` finds its log lines.
function refusal(status, text, requestId) {
  let body = null;
  try { body = JSON.parse(text); } catch { /* not JSON: `body` stays null */ }
  const error = new Error((body && body.message) || `The answer was ${status}.`);
  return Object.assign(error, { status, requestId, wantsKey: isKeyWanted(status, body) });
}

export const abortedError = () => new DOMException("It was cancelled.", "AbortError");

// A file's SHA-256 digest, null where the browser cannot compute it: plain http from elsewhere, or a large file.
async function digestOf(file) {
  if (!globalThis.crypto || !crypto.subtle || file.size > MOST_DIGESTED) return null;
  return new Uint8Array(await crypto.subtle.digest("SHA-256", await file.arrayBuffer()));
}

// Resolves to the server's `{ archive, sha256, bytes }` with `isNew`, false if it had the same file, and `isCompared`
// where the digest was sent along. `onProgress` gets "reading", or how many bytes are sent; all of them means that the
// server looks at it.
export async function sendArchive(file, name, { replaces, signal, onProgress }) {
  onProgress("reading");
  let digest;
  try { digest = await digestOf(file); } catch (error) { throw new Error(`${file.name} cannot be read (${error.message}).`); }
  if (signal.aborted) throw abortedError();
  return new Promise((resolve, reject) => {
    const call = new XMLHttpRequest(); // `fetch` says nothing of what is sent
    call.open("PUT", urlOf(`archives/${segment(name)}${replaces ? "?replace=true" : ""}`));
    const headers = { accept: "application/json", "content-type": "application/octet-stream", ...withKey() };
    if (digest) headers["repr-digest"] = `sha-256=:${btoa(String.fromCharCode(...digest))}:`;
    for (const [header, value] of Object.entries(headers)) call.setRequestHeader(header, value);
    call.upload.onprogress = (event) => onProgress(event.loaded);
    call.upload.onload = () => onProgress(file.size);
    call.onload = () => {
      if (call.status !== 200 && call.status !== 201) reject(refusal(call.status, call.responseText, call.getResponseHeader("x-request-id")));
      else resolve({ ...JSON.parse(call.responseText), isNew: call.status === 201, isCompared: !!digest });
    };
    call.onerror = () => reject(new Error("The connection broke off, and the server keeps nothing of the file. Is it there, and is the file as it was when you chose it?"));
    call.onabort = () => reject(abortedError());
    signal.addEventListener("abort", () => call.abort());
    onProgress(0);
    call.send(file);
  });
}

// Resolves once the workers have loaded the model, to `{ status, modelName, modelVersion }` with `isWhole`: all of them.
export async function orderRegistration(parameters) {
  const answer = await fetch(urlOf("models"), {
    method: "POST",
    headers: { accept: "application/json", "content-type": "application/json", ...withKey() },
    body: JSON.stringify({ ...parameters, synchronous: true }), // in the body: an address may have a secret in its query
    credentials: "omit",
    cache: "no-store",
  });
  const text = await answer.text();
  if (!answer.ok) throw refusal(answer.status, text, answer.headers.get("x-request-id"));
  return { ...JSON.parse(text), isWhole: answer.status === 200 };
}
