// The first page: how the server is, what it does, and its models.

import { html, useEffect, useRef, useState } from "../vendored/htm-preact.module.js";
import { ask, segment, urlOf } from "../calls.js";
import { Chart, LATENCY, RATE } from "./charts.js";
import { bytes, counted, DASH, milliseconds, rate, rounded } from "./figures.js";
import { Trouble, usePoll } from "./poll.js";
import { between, rowOf, Samples } from "./samples.js";
import { hashOf, ofModel } from "./routes.js";

const EVERY_MS = 2000;
const PAGE_ROWS = 50;
const MOST_WORKERS = 4; // of a version that are told of below its row
const SHOWN_REASONS = 4;
const SEARCH_AFTER_MS = 250;

// Kept while other pages are looked at.
const history = new Samples(4 * (EVERY_MS / 1000));

export function Overview({ onKeyWanted, keyRound }) {
  const [sort, setSort] = useState("rate");
  const [offset, setOffset] = useState(0);
  const [typed, setTyped] = useState("");
  const [search, setSearch] = useState("");
  useEffect(() => {
    const timer = setTimeout(() => { setSearch(typed); setOffset(0); }, SEARCH_AFTER_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  const poll = usePoll(async (signal) => {
    const found = await ask(`stats?sort=${sort}&limit=${PAGE_ROWS}&offset=${offset}&search=${segment(search)}`, { signal });
    const row = rowOf(history.last, found.times, found.at);
    history.add({ ...row, lag: found.eventLoop && found.eventLoop.lag });
    return found;
  }, { everyMs: EVERY_MS, keys: [sort, offset, search], onKeyWanted, keyRound });
  const { data } = poll;

  return html`
    <div class="head"><h2 id="page-heading" tabindex="-1">Overview</h2>
      ${data && !poll.isOld && html`<span class=${`pill ${data.ready ? "good" : "bad"}`}>${data.ready ? "ready" : "not ready"}</span>`}</div>
    <span class="hidden" role="status">${data && !poll.isOld ? (data.ready ? "The server is ready." : "The server is not ready.") : ""}</span>
    <${Trouble} poll=${poll} />
    ${!data && !poll.problem && html`<p class="muted">Reading what the server does…</p>`}
    ${data && html`<div class=${poll.isOld ? "old" : ""}>
      <${Reasons} reasons=${data.reasons} />
      <${Tiles} data=${data} />
      <div class="charts"><${Chart} title="Rate" samples=${history} series=${RATE} format=${(value) => rate(value)} />
        <${Chart} title="From arrival to answer" samples=${history} series=${LATENCY} format=${milliseconds} /></div>
      <${Devices} devices=${data.devices} />
      <${Models} data=${data} sort=${sort} onSort=${(next) => { setSort(next); setOffset(0); }} typed=${typed} onTyped=${setTyped} search=${search} offset=${offset} onOffset=${setOffset} />
    </div>`}`;
}

function Reasons({ reasons }) {
  if (!reasons.length) return null;
  const items = (some) => some.map((each) => html`<li key=${each}>${each}</li>`);
  return html`<div class="reasons"><ul>${items(reasons.slice(0, SHOWN_REASONS))}</ul>
    ${reasons.length > SHOWN_REASONS && html`<details class="more"><summary>${reasons.length - SHOWN_REASONS} more</summary><ul>${items(reasons.slice(SHOWN_REASONS))}</ul></details>`}</div>`;
}

function Tiles({ data }) {
  const minuteAgo = history.since(60, "times");
  const grown = minuteAgo && between(minuteAgo.times, data.times);
  const before = history.since(60, "lag");
  const lag = before && before.lag && data.eventLoop ? between(before.lag, data.eventLoop.lag) : null;
  const tiles = [
    ["Answers/s", rate(data.answersPerSecond), "last minute"],
    ["p95", grown && grown.count ? milliseconds(grown.quantile(0.95)) : DASH, "last minute"],
    ["Failed", data.errors.toLocaleString("en"), "last minute", data.errors > 0 && "bad"],
    ["Refused", data.refused.toLocaleString("en"), "last minute", data.refused > 0 && "fair"],
    ["Waiting", data.queued.toLocaleString("en"), `${data.running.toLocaleString("en")} running`],
    ["Memory", bytes(data.memoryBytes), "of all workers"],
    ["Versions", data.versionsInAll.toLocaleString("en"), "of all models"],
  ];
  if (data.eventLoop)
    tiles.push(["Loop lag, p99", lag && lag.count ? milliseconds(lag.quantile(0.99)) : DASH, data.eventLoop.stalls ? `${counted(data.eventLoop.stalls, "stall")}, ${rounded(data.eventLoop.longestStallSeconds)} s at most` : "no stall", data.eventLoop.stalls > 0 && "fair"]);
  return html`<dl class="tiles eight">${tiles.map(([name, value, more, tone]) => html`<div key=${name} class="card"><dt>${name}</dt><dd class=${tone || ""}>${value}</dd><dd class="muted">${more}</dd></div>`)}</dl>`;
}

function Devices({ devices }) {
  if (!devices.length) return null;
  return html`<section aria-labelledby="devices"><div class="head"><h3 id="devices">Devices</h3></div>
    <div class="list"><table class="figures"><thead><tr><th scope="col">GPU</th><th scope="col" class="number">Busy</th><th scope="col" class="number">Memory</th><th scope="col" class="number">Temperature</th></tr></thead>
      <tbody>${devices.map((each) => html`<tr key=${each.gpuId}><th scope="row">${each.gpuId}</th>
        <td class="number">${each.busyPercent === undefined ? DASH : `${rounded(each.busyPercent)} %`}</td>
        <td class="number">${each.totalBytes === undefined ? DASH : `${bytes(each.usedBytes)} of ${bytes(each.totalBytes)}`}</td>
        <td class="number">${each.celsius === undefined ? DASH : `${rounded(each.celsius)} °C`}</td></tr>
        ${each.trouble && html`<tr class="why"><td colspan="4" class="problem">${each.trouble}</td></tr>`}`)}</tbody></table></div></section>`;
}

const TONES = { ready: "good", degraded: "fair", loading: "fair", failed: "bad", idle: "" };
export const State = ({ state }) => html`<span class=${`state ${TONES[state] || ""}`}>${state}</span>`;

// Title, class, whether figures, what sorts by it, and the cell.
const COLUMNS = [
  ["Model", "", "name", (row) => html`<a href=${ofModel(row.modelName)}>${row.modelName}</a>`],
  ["Version", "", "", (row) => html`<a href=${ofModel(row.modelName, row.modelVersion)}>${row.modelVersion}</a>${row.isDefault ? html` <span class="tag" title="It answers requests that name no version">default</span>` : ""}`],
  ["State", "", "", (row) => html`<${State} state=${row.state} />`],
  ["Answers/s", "number", "rate", (row) => rate(row.answersPerSecond)],
  ["p50", "number wide", "", (row) => milliseconds(row.p50)],
  ["p99", "number", "p99", (row) => milliseconds(row.p99)],
  ["Waiting", "number", "queue", (row) => row.queued],
  ["Running", "number wide", "", (row) => row.running],
  ["Batch", "number wide", "", (row) => html`${row.meanBatch === undefined ? DASH : rounded(row.meanBatch)} <span class="muted">of ${row.batchSize}</span>`],
  ["Failed", "number wide", "", (row) => (row.errors ? html`<span class="problem">${row.errors}</span>` : 0)],
  ["Refused", "number wide", "", (row) => row.refused],
  ["Workers", "number", "", (row) => html`${row.readyWorkers} <span class="muted">of ${row.minWorkers}${row.maxWorkers > row.minWorkers ? `–${row.maxWorkers}` : ""}</span>`],
  ["Memory", "number wide", "memory", (row) => bytes(row.memoryBytes)],
];

function Models({ data, sort, onSort, typed, onTyped, search, offset, onOffset }) {
  const { versions, versionsInAll, versionsFound } = data;
  const top = useRef(null);
  const go = (place) => { onOffset(Math.max(0, place)); top.current.scrollIntoView(); };
  return html`<section aria-labelledby="models" ref=${top}>
    <div class="head"><h3 id="models">Models</h3>
      ${(versionsInAll > 8 || typed) && html`<input type="search" class="filter" aria-label="Find a model" placeholder=${`Find one of ${versionsInAll.toLocaleString("en")}`} maxlength="200" value=${typed} onInput=${(event) => onTyped(event.currentTarget.value)} />`}</div>
    <span class="hidden" role="status">${search ? `${counted(versionsFound, "version")} found` : ""}</span>
    ${!versionsInAll ? html`<p class="muted">No model is registered yet. <a href=${hashOf("register")}>Register one</a>.</p>`
      : !versions.length ? html`<p class="muted">No model has this in its name.</p>`
      : html`<div class="list"><table class="figures models" role="table"><caption class="hidden">Versions of models; rates and times are those of the last minute</caption>
        <thead><tr>${COLUMNS.map(([title, kind, by]) => html`<th key=${title} scope="col" class=${kind} aria-sort=${by && by === sort ? (by === "name" ? "ascending" : "descending") : undefined}>${by ? html`<button type="button" class="sort" onClick=${() => onSort(by)}>${title}</button>` : title}</th>`)}</tr></thead>
        <tbody>${versions.map((row) => html`<${Version} key=${`${row.modelName} ${row.modelVersion}`} row=${row} />`)}</tbody></table></div>`}
    ${versionsFound > PAGE_ROWS && html`<nav class="pages" aria-label="Pages of models">
      <button type="button" disabled=${offset === 0} onClick=${() => go(offset - PAGE_ROWS)}>Before</button>
      <span>${(offset + 1).toLocaleString("en")} to ${Math.min(offset + PAGE_ROWS, versionsFound).toLocaleString("en")} of ${versionsFound.toLocaleString("en")}</span>
      <button type="button" disabled=${offset + PAGE_ROWS >= versionsFound} onClick=${() => go(offset + PAGE_ROWS)}>Next</button></nav>`}
    <p class="muted note">Rates and times are those of the last minute. Each model can be tried, and everything else done, at <a href=${urlOf("docs")}>docs</a>.</p>
  </section>`;
}

function Version({ row }) {
  const troubled = row.workers.filter((each) => each.why);
  return html`<tr role="row">${COLUMNS.map(([title, kind, , cell], index) => (index ? html`<td role="cell" class=${kind} data-title=${title}>${cell(row)}</td>` : html`<th scope="row" role="rowheader">${cell(row)}</th>`))}</tr>
    ${troubled.length > 0 && html`<tr class="why" role="row"><td role="cell" colspan=${COLUMNS.length}><ul>${troubled.slice(0, MOST_WORKERS).map((each) => html`<li key=${each.id}>worker ${each.id}: ${each.status.toLowerCase()}, ${each.why}</li>`)}
      ${troubled.length > MOST_WORKERS && html`<li><a href=${ofModel(row.modelName)}>${troubled.length - MOST_WORKERS} more</a></li>`}</ul></td></tr>`}`;
}
