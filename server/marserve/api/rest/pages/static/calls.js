// Requests to the server that sent this page: addresses, the key, one call, and the same call as a line for a shell.

const base = new URL(".", location.href);
const MOST_KEPT = 64 * 1024 * 1024; // bytes of an answer; more is read and dropped

let key = ""; // in this variable alone: a reload forgets it

export const setKey = (value) => { key = value.trim(); };
export const hasKey = () => key !== "";

export const urlOf = (path) => new URL(path.replace(/^\/+/, ""), base).href;
export const segment = (text) => encodeURIComponent(text);

// JSON of a path of this server. `order` has `method`, `headers`, `body`, `signal` as `fetch` does. Throws an error whose
// `wantsKey` says that a key is missing or wrong; `status` is the answer's, and missing where none came.
export async function ask(path, order = {}) {
  const headers = { accept: "application/json", ...order.headers, ...withKey() };
  const answer = await fetch(urlOf(path), { ...order, headers, credentials: "omit", cache: "no-store" });
  const text = await answer.text();
  let body = null;
  try { body = JSON.parse(text); } catch { /* not JSON: `body` stays null */ }
  if (answer.ok) return body;
  const error = new Error((body && body.message) || `The answer was ${answer.status}.`);
  error.wantsKey = isKeyWanted(answer.status, body);
  error.status = answer.status;
  throw error;
}

export const isKeyWanted = (status, body) =>
  status === 401 || ((status === 400 || status === 403) && !!body && body.type === "InvalidKeyException");

export const withKey = () => (key ? { authorization: `Bearer ${key}` } : {});

// Sends `{ method, path, query, headers, body }`. `onProgress` gets the answer as far as it is there: status, headers,
// bytes, milliseconds, and `isWhole` with the last one.
export async function send(request, signal, onProgress) {
  const began = performance.now();
  const url = new URL(urlOf(request.path));
  for (const [name, value] of request.query || []) url.searchParams.append(name, value);
  const answer = await fetch(url, {
    method: request.method,
    headers: { ...request.headers, ...withKey() },
    body: request.body,
    credentials: "omit",
    cache: "no-store",
    signal,
  });
  const seen = {
    status: answer.status,
    type: answer.headers.get("content-type") || "",
    requestId: answer.headers.get("x-request-id") || "",
    version: answer.headers.get("x-marserve-version") || "",
    firstMs: performance.now() - began,
  };
  const pieces = [];
  let size = 0;
  let kept = 0;
  const report = (isWhole) =>
    onProgress({ ...seen, ms: performance.now() - began, size, pieces, isWhole, isCut: kept < size });
  report(false);
  const reader = answer.body && answer.body.getReader();
  while (reader) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.length;
    if (size <= MOST_KEPT) {
      pieces.push(value);
      kept = size;
    }
    report(false);
  }
  report(true);
}

const quote = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`);

// The same request for a shell. `shown` says what stands for the body: `{ text }`, `{ file }` or `{ parts }`.
export function curlOf(request, shown) {
  const url = new URL(urlOf(request.path));
  for (const [name, value] of request.query || []) url.searchParams.append(name, value);
  const words = ["curl"];
  if (request.method !== (shown ? "POST" : "GET")) words.push("-X", request.method);
  if (key) words.push("-H", '"Authorization: Bearer $KEY"');
  for (const [name, value] of Object.entries(request.headers || {})) words.push("-H", quote(`${name}: ${value}`));
  if (shown && shown.file !== undefined) words.push("--data-binary", quote(`@${shown.file}`));
  else if (shown && shown.parts) {
    for (const part of shown.parts)
      words.push(part.file === undefined ? "--form-string" : "-F", quote(`${part.name}=${part.file === undefined ? part.text : `@${part.file}`}`));
  } else if (shown && shown.text.length > 2000) words.push("--data-binary", "@body.json");
  else if (shown) words.push("--data-binary", quote(shown.text));
  words.push(quote(url.href));
  return words.join(" ");
}
