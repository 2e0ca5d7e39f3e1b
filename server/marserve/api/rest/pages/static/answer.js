// Shows an answer: as text, whatever it holds; pictures as pictures; scores as bars.

import { html, useEffect, useState } from "./vendored/htm-preact.module.js";

const MOST_SHOWN = 200_000; // characters
const MOST_BARS = 20;
const PICTURES = /^image\/(png|jpeg|gif|webp)\b/;

export function Answer({ answer, problem, isBusy }) {
  const status = answer && (answer.status < 400 ? "good" : "bad");
  const said = isBusy ? "Waiting for the answer" : answer ? `Answer ${answer.status} after ${milliseconds(answer.ms)}` : "";
  return html`<div class="answer">
    <span class="hidden" role="status">${said}</span>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${isBusy && !answer && html`<p class="muted">Waiting for the answer…</p>`}
    ${answer && html`<div>
      <p class="facts">
        <strong class=${`pill ${status}`}>${answer.status}</strong>
        <span>${milliseconds(answer.ms)}</span>
        <span>${bytes(answer.size)}</span>
        ${!answer.isWhole && html`<span class="muted">more is coming…</span>`}
        ${answer.version && html`<span>version ${answer.version}</span>`}
        ${answer.requestId && html`<span class="id" title="The request's id">${answer.requestId}</span>`}
      </p>
      <${Body} answer=${answer} />
    </div>`}
  </div>`;
}

function Body({ answer }) {
  if (!answer.size) return answer.isWhole ? html`<p class="muted">The answer has no body.</p>` : null;
  if (PICTURES.test(answer.type)) return answer.isWhole && html`<${Picture} pieces=${answer.pieces} type=${answer.type} />`;
  const { text, isText } = decode(answer);
  const value = answer.isWhole && isText ? parse(text) : undefined;
  const scores = value === undefined ? null : scoresOf(value);
  const shown = value === undefined || /\n\s*\S/.test(text) ? text : indent(text);
  return html`<div>
    ${scores && html`<${Scores} scores=${scores} />`}
    <pre class="body" role="group" tabindex="0" aria-label="The answer's body">${
      value === undefined || shown.length > 20_000 ? shown.slice(0, MOST_SHOWN) : paint(shown)
    }</pre>
    ${(shown.length > MOST_SHOWN || !isText || answer.isCut) && html`<p class="muted">
      ${isText ? "This is its beginning." : "It is no text; these are its first bytes."}${" "}
      ${answer.isWhole && !answer.isCut && html`<${Keep} pieces=${answer.pieces} />`}
    </p>`}
  </div>`;
}

function decode(answer) {
  const whole = join(answer.pieces, MOST_SHOWN * 4);
  try {
    return { text: new TextDecoder("utf-8", { fatal: true }).decode(whole, { stream: true }), isText: true };
  } catch {
    const first = [...whole.subarray(0, 256)].map((each) => each.toString(16).padStart(2, "0"));
    return { text: first.join(" ").replace(/((?:\S+ ){15}\S+) /g, "$1\n"), isText: false };
  }
}

function join(pieces, most = Infinity) {
  let size = 0;
  const used = [];
  for (const piece of pieces) {
    if (size >= most) break;
    used.push(piece);
    size += piece.length;
  }
  const whole = new Uint8Array(size);
  let at = 0;
  for (const piece of used) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

function parse(text) {
  if (!/^\s*[[{"\d-]/.test(text) || text.length > 2_000_000) return undefined;
  try { return JSON.parse(text); } catch { return undefined; }
}

// Labels with numbers from 0 to 1, as classifiers answer; null for anything else.
function scoresOf(value) {
  if (!value || typeof value !== "object" || Array.isArray(value)) return null;
  const entries = Object.entries(value);
  const isScore = ([, each]) => typeof each === "number" && each >= 0 && each <= 1;
  if (entries.length < 2 || entries.length > 1000 || !entries.every(isScore)) return null;
  return entries.sort((one, other) => other[1] - one[1]).slice(0, MOST_BARS);
}

function Scores({ scores }) {
  return html`<table class="scores"><caption class="hidden">Scores, largest first</caption><tbody>
    ${scores.map(([label, score]) => html`<tr key=${label}>
      <th scope="row">${label}</th>
      <td class="bar" aria-hidden="true"><span style=${{ width: `${score * 100}%` }}></span></td>
      <td class="score">${(score * 100).toFixed(score < 0.001 ? 3 : 1)} %</td>
    </tr>`)}
  </tbody></table>`;
}

const WORD = /("(?:[^"\\]|\\.)*"(?:\s*:)?|\b(?:true|false|null)\b|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)/;

// JSON of one line over several, each word as it was sent: reading and writing it again would round long numbers and
// put names in another order. Lists of numbers stay on a line.
function indent(text) {
  let depth = 0;
  const newLine = () => `\n${"  ".repeat(depth)}`;
  const flat = text.split(/("(?:[^"\\]|\\.)*"|\[[^[\]{}"]*\]|\{\s*\})/);
  return flat.map((word, index) => {
    if (index % 2) return word[0] === "[" ? word.replace(/\s+/g, "").replace(/,/g, ", ") : word;
    return word.replace(/\s+/g, "").replace(/[[{\]},:]/g, (sign) => {
      if (sign === ":") return ": ";
      if (sign === ",") return `,${newLine()}`;
      depth += sign === "[" || sign === "{" ? 1 : -1;
      return sign === "[" || sign === "{" ? `${sign}${newLine()}` : `${newLine()}${sign}`;
    });
  }).join("");
}

// Words of JSON in colours, as text nodes.
function paint(text) {
  const words = text.split(WORD);
  return words.map((word, index) => {
    if (index % 2 === 0) return word;
    const kind = word[0] === '"' ? (word.endsWith(":") ? "name" : "text") : "value";
    return html`<span class=${`json-${kind}`}>${word}</span>`;
  });
}

function Picture({ pieces, type }) {
  const url = useObjectUrl(pieces, type.split(";")[0]);
  return url && html`<img class="picture" src=${url} alt="The picture that the model answered" />`;
}

function Keep({ pieces }) {
  const url = useObjectUrl(pieces, "application/octet-stream"); // a type that no browser opens as a page
  return url && html`<a href=${url} download="answer">Save the whole answer</a>`;
}

export function useObjectUrl(pieces, type) {
  const [url, setUrl] = useState("");
  useEffect(() => {
    if (!pieces) return setUrl("");
    const made = URL.createObjectURL(new Blob(pieces, { type }));
    setUrl(made);
    return () => URL.revokeObjectURL(made);
  }, [pieces, type]);
  return url;
}

export const milliseconds = (ms) => (ms < 10 ? `${ms.toFixed(1)} ms` : ms < 10_000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
export function bytes(size) {
  if (size < 1000) return `${size} bytes`;
  return size < 1e6 ? `${(size / 1e3).toFixed(1)} kB` : `${(size / 1e6).toFixed(1)} MB`;
}
