// A request's stages as bars, one below the other, each from where it began.

import { html } from "../vendored/htm-preact.module.js";
import { milliseconds } from "./figures.js";

// Who had the request then: its colour, and what it stands for.
const PLACES = [["a", "the author's code"], ["c", "waiting for a worker"], ["b", "the worker"], ["h", "the server"], ["g", "the client"]];
const STAGES = {
  header: ["g", "from the first byte until the header was complete"],
  body: ["g", "until the last byte of the body"],
  admit: ["h", "until a version accepted it"],
  queue: ["c", "until it left for a worker that was free for it"],
  send: ["h", "until the worker began with its batch"],
  decode: ["b", "until the author's code was called"],
  handle: ["a", "until that returned"],
  encode: ["b", "until the worker had made its answers bytes"],
  return: ["h", "until the server had them"],
  write: ["h", "until the last byte of the answer was given to the system"],
};
const MOST_SPANS = 50;
const LONGEST_NAME = 24; // characters of an author's span; the rest is in the title

// Rows `{ name, place, began, ms, what, isSpan }` of a request; spans of the author's follow `handle`.
export function rowsOf({ stages, spans }) {
  const rows = [];
  let at = 0;
  let ran = 0;
  for (const { name, ms } of stages) {
    const [place, what] = STAGES[name] || ["h", ""];
    rows.push({ name, place, began: at, ms, what });
    if (name === "decode") ran = at;
    if (name === "handle")
      for (const each of (spans || []).slice(0, MOST_SPANS)) rows.push({ name: each.name, place: "a", began: ran + each.after_ms, ms: each.ms, what: "named by the model's author", isSpan: true });
    at += ms;
  }
  return rows;
}

export function Waterfall({ request }) {
  const whole = Math.max(request.wall_ms, ...rowsOf(request).map((row) => row.began + row.ms), 0.001);
  const rows = rowsOf(request);
  const places = PLACES.filter(([place]) => rows.some((row) => row.place === place && row.ms > 0));
  const part = (ms) => `${Math.min(100, Math.max(0, (100 * ms) / whole))}%`;
  return html`<table class="waterfall"><caption class="hidden">Stages in order, with how long each took</caption>
      <thead class="hidden"><tr><th scope="col">Stage</th><th scope="col">Course</th><th scope="col">Took</th></tr></thead>
      <tbody>${rows.map((row, index) => html`<tr key=${index} class=${[row.isSpan && "span", row.ms * 200 < whole && "little"].filter(Boolean).join(" ")} title=${row.what && `${row.name}: ${row.what}`}>
        <th scope="row">${row.name.length > LONGEST_NAME ? `${row.name.slice(0, LONGEST_NAME)}…` : row.name}</th>
        <td class="course" aria-hidden="true">${row.ms > 0 && html`<i class=${`line-${row.place}`} style=${{ marginLeft: part(row.began), width: part(row.ms) }}></i>`}</td>
        <td class="number">${milliseconds(row.ms)}</td></tr>`)}</tbody></table>
    <p class="legend note">${places.map(([place, name]) => html`<span key=${place}><i class=${`line-${place}`}></i>${name}</span>`)}
      ${request.spans && request.spans.length > MOST_SPANS && html`<span>${request.spans.length - MOST_SPANS} more parts that the author named</span>`}</p>`;
}
