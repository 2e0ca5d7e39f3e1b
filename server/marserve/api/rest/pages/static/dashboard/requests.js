// The recorded requests: found by an id, by model, time, cause and failure; what took most of their time.

import { html, useEffect, useState } from "../vendored/htm-preact.module.js";
import { ask } from "../calls.js";
import { counted, milliseconds } from "./figures.js";
import { Trouble, usePoll } from "./poll.js";
import { CAUSES, timeOf, toneOf } from "./recorded.js";
import { hashOf, ofModel, ofRequest } from "./routes.js";

export { OneRequest } from "./explained.js";

const EVERY_MS = 3000;
const NEVER_MS = 2 ** 31 - 1; // the longest that a browser's timer waits
const TYPED_MS = 400;
const LISTED = 50;
const MOST_LISTED = 1000;

const isTime = (text) => /^[0-9]{1,9}(\.[0-9]{1,6})?(ms|s|m)?$/.test(text);

const wantedOf = (parameters) => ({
  model: parameters.model || "",
  slowerThan: parameters.slower_than || "",
  cause: CAUSES[parameters.cause] ? parameters.cause : "",
  isFailed: parameters.failed === "true",
  order: parameters.order === "newest" ? "newest" : "slowest",
});

function queryOf(wanted) {
  const query = new URLSearchParams();
  if (wanted.model) query.set("model", wanted.model);
  if (isTime(wanted.slowerThan)) query.set("slower_than", wanted.slowerThan);
  if (wanted.cause) query.set("cause", wanted.cause);
  if (wanted.isFailed) query.set("failed", "true");
  if (wanted.order === "newest") query.set("order", "newest");
  return query.toString();
}

export function Requests({ route, onKeyWanted, keyRound }) {
  const said = JSON.stringify(route.parameters);
  const [wanted, setWanted] = useState(() => wantedOf(route.parameters));
  const [asked, setAsked] = useState(() => queryOf(wantedOf(route.parameters)));
  const [isLive, setLive] = useState(true);
  const [limit, setLimit] = useState(LISTED);
  useEffect(() => { setWanted(wantedOf(route.parameters)); }, [said]);
  const query = queryOf(wanted);
  useEffect(() => {
    const timer = setTimeout(() => {
      setAsked(query);
      // The address leads here again, as from a request's page back to the list.
      if (location.hash.replace(/\?.*$/s, "") === "#/requests") history.replaceState(null, "", `${hashOf("requests")}${query ? `?${query}` : ""}`);
    }, TYPED_MS);
    return () => clearTimeout(timer);
  }, [query]);
  const poll = usePoll((signal) => ask(`requests?${asked ? `${asked}&` : ""}limit=${limit}`, { signal }), { everyMs: isLive ? EVERY_MS : NEVER_MS, keys: [asked, limit], onKeyWanted, keyRound });
  const { data } = poll;
  const change = (next) => setWanted({ ...wanted, ...next });

  return html`
    <div class="head"><h2 id="page-heading" tabindex="-1">Requests</h2>
      <label class="check end"><input type="checkbox" checked=${isLive} onChange=${(event) => setLive(event.currentTarget.checked)} /> Live</label>
      ${!isLive && html`<button type="button" onClick=${poll.again}>Look again</button>`}</div>
    <${Find} />
    <${Filters} wanted=${wanted} onChange=${change} models=${data ? [...new Set(data.requests.map((each) => each.model))].filter(Boolean) : []} />
    ${poll.isGone ? html`<p class="problem banner" role="alert"><span>This server records no requests: <code>flight_recorder_size</code> is 0.</span></p>` : html`<${Trouble} poll=${poll} />`}
    ${!data && !poll.problem && html`<p class="muted">Reading the recorded requests…</p>`}
    ${data && html`<div class=${poll.isOld ? "old" : ""}>
      <${Causes} requests=${data.requests} chosen=${wanted.cause} onChoose=${(cause) => change({ cause })} order=${wanted.order} />
      <${Rows} requests=${data.requests} />
      <p class="muted note"><span role="status">${listedOf(data)}</span>
        ${data.requests.length >= limit && limit < MOST_LISTED && html`<button type="button" class="quiet" onClick=${() => setLimit(MOST_LISTED)}>List up to ${MOST_LISTED.toLocaleString("en")}</button>`}</p>
    </div>`}`;
}

function listedOf({ requests, recorded }) {
  if (!recorded) return "No request is recorded yet.";
  if (!requests.length) return `None of the ${counted(recorded, "recorded request")} is such a one.`;
  return `${requests.length.toLocaleString("en")} of ${counted(recorded, "recorded request")}.`;
}

function Find() {
  const [typed, setTyped] = useState("");
  const go = (event) => {
    event.preventDefault();
    if (typed.trim()) location.hash = ofRequest(typed.trim());
  };
  return html`<form class="find" role="search" onSubmit=${go}>
    <label class="field"><span class="label">Request id <span class="muted">an answer's <code>x-request-id</code>, an id of your own, or a trace's</span></span>
      <input value=${typed} spellcheck=${false} autocomplete="off" onInput=${(event) => setTyped(event.currentTarget.value)} /></label>
    <button type="submit" class="primary">Explain</button></form>`;
}

function Filters({ wanted, onChange, models }) {
  const { slowerThan } = wanted;
  const isWrong = slowerThan !== "" && !isTime(slowerThan);
  return html`<div class="filters" role="group" aria-label="Which requests">
    <label class="field"><span class="label">Model</span><input list="request-models" value=${wanted.model} spellcheck=${false} autocomplete="off" placeholder="all" onInput=${(event) => onChange({ model: event.currentTarget.value.trim() })} /></label>
    <datalist id="request-models">${models.map((each) => html`<option key=${each} value=${each}></option>`)}</datalist>
    <label class="field"><span class="label">Slower than</span><input value=${slowerThan} placeholder="250ms" autocomplete="off" aria-invalid=${isWrong} aria-describedby=${isWrong ? "slower-wrong" : undefined} onInput=${(event) => onChange({ slowerThan: event.currentTarget.value.trim() })} />
      ${isWrong && html`<span class="problem hint" id="slower-wrong" role="alert">A time, as 250ms, 1.5s or 2m.</span>`}</label>
    <label class="field"><span class="label">Cause</span><select value=${wanted.cause} onChange=${(event) => onChange({ cause: event.currentTarget.value })}>
      <option value="">all</option>${Object.keys(CAUSES).map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>
    <label class="field"><span class="label">First</span><select value=${wanted.order} onChange=${(event) => onChange({ order: event.currentTarget.value })}>
      <option value="slowest">the slowest</option><option value="newest">the newest</option></select></label>
    <label class="check"><input type="checkbox" checked=${wanted.isFailed} onChange=${(event) => onChange({ isFailed: event.currentTarget.checked })} /> Only failed</label>
  </div>`;
}

// What happened most among the listed: each cause with how often, to choose it.
function Causes({ requests, chosen, onChoose, order }) {
  if (chosen) return html`<p class="chosen"><strong>${chosen}</strong>: ${CAUSES[chosen]}. <button type="button" class="quiet" onClick=${() => onChoose("")}>All causes</button></p>`;
  if (!requests.length) return null;
  const counts = new Map();
  for (const { cause } of requests) counts.set(cause, (counts.get(cause) || 0) + 1);
  const ranked = [...counts].sort(([one, a], [other, b]) => b - a || one.localeCompare(other));
  return html`<div class="causes" role="group" aria-label=${`Causes of the ${order} ${requests.length}`}>${ranked.map(([cause, count]) => html`<button key=${cause} type="button" title=${CAUSES[cause]} onClick=${() => onChoose(cause)}>
    <span>${cause}</span> <b>${count.toLocaleString("en")}</b><i aria-hidden="true"><i style=${{ width: `${(100 * count) / requests.length}%` }}></i></i></button>`)}</div>`;
}

function Rows({ requests }) {
  if (!requests.length) return null;
  const longest = Math.max(...requests.map((each) => each.wall_ms), 0.001);
  return html`<div class="list"><table class="figures models requests" role="table"><caption class="hidden">Recorded requests</caption>
    <thead><tr><th scope="col">Request</th><th scope="col" class="number">Took</th><th scope="col">Cause</th><th scope="col">Model</th><th scope="col">Status</th><th scope="col" class="wide">Came</th></tr></thead>
    <tbody>${requests.map((each, index) => html`<tr key=${`${each.id} ${each.started} ${index}`} role="row">
      <th scope="row" role="rowheader"><a class="id" href=${ofRequest(each.id)}>${each.id}</a></th>
      <td role="cell" class="number took" data-title="Took">${milliseconds(each.wall_ms)}<i aria-hidden="true"><i style=${{ width: `${(100 * each.wall_ms) / longest}%` }}></i></i></td>
      <td role="cell" data-title="Cause" title=${each.why}>${each.cause}</td>
      <td role="cell" data-title="Model">${each.model ? html`<a href=${ofModel(each.model, each.version)}>${each.model}</a> <span class="muted">${each.version}</span>` : html`<span class="muted">none</span>`}</td>
      <td role="cell" data-title="Status"><span class=${`state ${toneOf(each)}`}>${each.status}</span>${each.error && html` <span class="muted">${each.error}</span>`}</td>
      <td role="cell" class="wide" data-title="Came" title=${each.started}>${timeOf(each.started)}</td></tr>`)}</tbody></table></div>`;
}
