// One request: why it took so long, its course, its batch, what else the server did then, and its log lines.

import { html, useEffect, useRef, useState } from "../vendored/htm-preact.module.js";
import { ask, segment } from "../calls.js";
import { Copied } from "./copied.js";
import { bytes, counted, milliseconds, percent } from "./figures.js";
import { sentenceOf } from "./poll.js";
import { CAUSES, timeOf, toneOf } from "./recorded.js";
import { hashOf, ofModel, ofRequest } from "./routes.js";
import { Waterfall } from "./waterfall.js";

const LONGEST_ID = 128; // characters, as the server takes them
const LONGEST_SHOWN = 200;
const LOG_LINES = 200;
const LONGEST_LINE = 8000;

export const shortOf = (text, most = LONGEST_SHOWN) => (text.length > most ? `${text.slice(0, most)}…` : text);
// A word as a shell takes it.
const quoted = (text) => (/^[\w@%+=:,./][\w@%+=:,./-]*$/.test(text) ? text : `-- '${text.replace(/'/g, "'\\''")}'`);

// Why no server needs to be asked for an id; empty for one that could be.
function faultOf(id) {
  if (id.length > LONGEST_ID) return `The id has ${id.length.toLocaleString("en")} characters; a request's id has at most ${LONGEST_ID}.`;
  if (id === "." || id === "..") return `No address can name the id ${id}; it may be in the list of requests.`;
  return "";
}

export function OneRequest({ route, onKeyWanted, keyRound }) {
  const { id } = route;
  const [seen, setSeen] = useState({ request: null, problem: faultOf(id), isGone: false });
  const [round, setRound] = useState(0);
  useEffect(() => {
    if (faultOf(id)) return undefined;
    const stop = new AbortController();
    ask(`requests/${segment(id)}`, { signal: stop.signal }).then(
      (request) => setSeen({ request, problem: "", isGone: false }),
      (error) => {
        if (stop.signal.aborted) return;
        if (error.wantsKey) onKeyWanted();
        setSeen((before) => ({ ...before, problem: sentenceOf(error), isGone: error.status === 404 }));
      },
    );
    return () => stop.abort();
  }, [id, round, keyRound]);
  const { request, problem, isGone } = seen;

  return html`
    <p class="crumb"><a href=${hashOf("requests")}>Requests</a></p>
    <div class="head"><h2 id="page-heading" tabindex="-1">Request <span class="id">${shortOf(id, LONGEST_ID)}</span></h2></div>
    ${problem && html`<div class="problem banner" role="alert"><span>${shortOf(problem, 600)}</span>${!faultOf(id) && html`<button type="button" onClick=${() => setRound(round + 1)}>Look again</button>`}</div>`}
    ${!request && !problem && html`<p class="muted">Reading what is recorded of it…</p>`}
    ${request && html`<${Explained} request=${request} />`}
    ${(request || isGone) && html`<${LogLines} id=${request ? request.id : id} round=${round} keyRound=${keyRound} />`}
    ${request && html`<${Copied} text=${`marserve explain ${quoted(request.id)}`} what="The same in a terminal" />`}`;
}

function Explained({ request }) {
  const { batch } = request;
  return html`
    <p class="facts"><span class=${`pill ${toneOf(request)}`}>${request.status}</span>
      ${request.error && html`<span class="problem">${request.error}</span>`}
      <span>${request.model ? html`<a href=${ofModel(request.model, request.version)}>${request.model} ${request.version}</a>` : "no model took it"}</span>
      <span class="id">${request.worker || "no worker"}</span>
      <span title=${request.started}>came ${timeOf(request.started)}</span>
      <span>${bytes(request.bytes_in)} in, ${bytes(request.bytes_out)} out</span>
      ${request.client_id && html`<span class="id">its client's id: <a href=${ofRequest(request.client_id)}>${request.client_id}</a></span>`}</p>
    <section class="panel why-panel" aria-labelledby="why"><h3 id="why">Why it took ${milliseconds(request.wall_ms)}: <span class="cause">${request.cause}</span></h3>
      <p>${linked(request.why)}.</p>
      ${CAUSES[request.cause] && html`<p class="muted note"><code>${request.cause}</code> means: ${CAUSES[request.cause]}.</p>`}
      ${request.also.length > 0 && html`<ul class="also">${request.also.map((each) => html`<li key=${each}>also ${linked(each)}</li>`)}</ul>`}</section>
    <section class="panel" aria-labelledby="course"><h3 id="course">Its course</h3><${Waterfall} request=${request} />
      ${request.first_piece_ms !== undefined && html`<p class="note">The first piece of its stream came after ${milliseconds(request.first_piece_ms)}.</p>`}
      ${request.moved_from && html`<p class="note">Version ${request.moved_from} had accepted it before.</p>`}
      ${request.remote_worker && html`<p class="note">Its worker is on another machine: <code>send</code> has all of the way there and back.</p>`}</section>
    <div class="panels">
      <section class="panel" aria-labelledby="batch"><h3 id="batch">Its batch</h3>${batch ? html`<${Batch} batch=${batch} />` : html`<p class="muted">It went to no worker.</p>`}</section>
      <section class="panel" aria-labelledby="meanwhile"><h3 id="meanwhile">Meanwhile</h3>${request.meanwhile.length ? html`<ul class="plain">${request.meanwhile.map((each, index) => html`<li key=${index}>${each}</li>`)}</ul>` : html`<p class="muted">The server did nothing else that could have held it up.</p>`}</section>
      ${request.others.length > 0 && html`<section class="panel" aria-labelledby="others"><h3 id="others">Others of this id</h3><p class="muted">Clients need not make their ids unique. This is the newest; older ones:</p>
        <ul class="plain">${request.others.map((each, index) => html`<li key=${index} title=${each.started}>${timeOf(each.started)}${each.id !== request.id && html` <a class="id" href=${ofRequest(each.id)}>${each.id}</a>`}</li>`)}</ul></section>`}
      ${request.trace_id && html`<section class="panel" aria-labelledby="trace"><h3 id="trace">Its trace</h3><${Copied} text=${request.trace_id} what="" /></section>`}
    </div>`;
}

function Batch({ batch }) {
  const facts = [counted(batch.size, "request"), `${milliseconds(batch.handler_ms)} in the handler`];
  if (batch.padding !== undefined && batch.size > 1) facts.push(`${percent(batch.padding)} padding if inputs are padded to the largest`);
  if (batch.first_of_worker) facts.push("the first of its worker");
  if (batch.runs > 1) facts.push(`the last of ${batch.runs} that it was in`);
  const unnamed = batch.size - 1 - batch.mates.length;
  return html`<ul class="plain">${facts.map((each) => html`<li key=${each}>${each}</li>`)}</ul>
    ${batch.mates.length > 0 && html`<p class="note muted">With ${counted(batch.mates.length, "mate")}${unnamed > 0 ? ` and ${unnamed} that are not recorded` : ""}:</p>
      <ul class="mates">${batch.mates.map((each, index) => html`<li key=${index}><a class="id" href=${ofRequest(each)}>${each}</a></li>`)}</ul>`}`;
}

// A sentence of the server's with the requests that it names as links.
function linked(sentence) {
  return sentence.split(/(\brequest [A-Za-z0-9._:-]{1,128})/).map((part, index) => {
    if (index % 2 === 0) return part;
    const id = part.slice("request ".length);
    return html`request <a class="id" href=${ofRequest(id)}>${id}</a>`;
  });
}

function LogLines({ id, round, keyRound }) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  const [again, setAgain] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    ask(`logs?request=${segment(id)}&tail=${LOG_LINES}`, { signal: stop.signal }).then(
      (lines) => { setFound(lines); setProblem(""); },
      (error) => { if (!stop.signal.aborted) setProblem(sentenceOf(error)); },
    );
    return () => stop.abort();
  }, [id, round, again, keyRound]);
  return html`<section class="panel" aria-labelledby="its-log"><div class="head"><h3 id="its-log">Its log lines</h3><button type="button" class="end quiet" onClick=${() => setAgain(again + 1)}>Look again</button></div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${!found && !problem && html`<p class="muted">Looking through the logs…</p>`}
    ${found && html`<${Lines} lines=${found.lines} />
      ${!found.lines.length && html`<p class="muted">No line of the logs has this id.</p>`}
      ${!found.complete && html`<p class="muted note">There may be more: time or room did not suffice for all of the logs.</p>`}`}</section>`;
}

export function Lines({ lines }) {
  const box = useRef(null);
  useEffect(() => { if (box.current) box.current.scrollTop = box.current.scrollHeight; }, [lines.length]);
  if (!lines.length) return null;
  return html`<div class="lines some" ref=${box} tabindex="0" role="group" aria-label="Log lines">${lines.map((each, index) => html`<p key=${index} class=${`level-${["warn", "error"].includes(each.level.toLowerCase()) ? each.level.toLowerCase() : "other"}`}>${shortOf(each.text, LONGEST_LINE)}</p>`)}</div>`;
}
