// Which build of a model serves, and what the search for a faster one showed of each.

import { html } from "../vendored/htm-preact.module.js";
import { ask, segment } from "../calls.js";
import { counted } from "./figures.js";
import { Trouble, usePoll } from "./poll.js";
import { ofModel } from "./routes.js";

const EVERY_MS = 2000;
const DASH = "–";
const MORE = 3; // faults and notes that are shown of a build

const STATES = {
  none: "Nothing is looked for",
  waits: "Waits for its turn",
  builds: "Builds are tried",
  serves: "A build serves",
  parent: "The parent serves",
};

export function Optimise({ route, onKeyWanted, keyRound }) {
  const { name } = route;
  const path = `models/${segment(name)}${route.version ? `/${segment(route.version)}` : ""}/optimise`;
  const poll = usePoll((signal) => ask(path, { signal }), { everyMs: EVERY_MS, keys: [path], onKeyWanted, keyRound });
  const head = html`<p class="crumb"><a href="#/">Overview</a> / <a href=${ofModel(name, route.version)}>${name}</a> /</p>
    <div class="head"><h2 id="page-heading" tabindex="-1">Builds of ${name}</h2></div>`;
  if (poll.isGone) return html`${head}<p class="problem banner" role="alert">${poll.problem}</p><p><a href="#/">All models</a></p>`;
  const { data } = poll;
  return html`${head}
    <${Trouble} poll=${poll} />
    ${data && html`<${Standing} data=${data} />`}
    ${data && data.report && html`<${Table} report=${data.report} serves=${data.build} />`}`;
}

function Standing({ data }) {
  const { state, build, why, step, ratios, meanError, agreement, workers } = data;
  const tiles = (ratios || []).filter((each) => each.threads === ratios[0].threads)
    .map((each) => [each.rows === 1 ? "One row at a time" : `${each.rows} rows at a time`, times(each.ratio), `${times(each.low)} to ${times(each.high)} with 96 % certainty`]);
  if (meanError !== undefined) tiles.push(["Mean error", small(meanError), "of the mean output"]);
  if (agreement !== undefined) tiles.push(["Agreement", percent(agreement), "as shown with 95 % certainty"]);
  return html`<section class="panel" aria-labelledby="standing"><h3 id="standing">${STATES[state] || state}${build ? html`: <span class="id">${build}</span>` : ""}</h3>
    <p role="status">${step ? `${data.modelVersion}: ${step}` : why ? sentence(why) : `It took the place of ${data.modelVersion}'s own model, and no request was lost.`}</p>
    ${workers && html`<p class="muted">${Object.entries(workers).map(([each, count]) => `${counted(count, "worker")} with ${each === "parent" ? "the parent" : each}`).join(", ")}${data.isCached ? "; found by an earlier search" : ""}</p>`}
    ${tiles.length > 0 && html`<dl class="tiles">${tiles.map(([title, value, more]) => html`<div key=${title} class="card"><dt>${title}</dt><dd>${value}</dd><dd class="muted">${more}</dd></div>`)}</dl>`}
  </section>`;
}

function Table({ report, serves }) {
  const sizes = [...new Set([1, report.batchSize])];
  return html`<section class="panel" aria-labelledby="builds"><h3 id="builds">What was tried</h3>
    <p class="muted">${counted(report.calibrated, "input")} calibrated, ${report.compared} were compared; ${counted(report.threads, "thread")}; ${Math.round(report.seconds)} s.</p>
    <table role="table" class="figures models builds"><caption class="hidden">Builds</caption>
      <thead role="rowgroup"><tr role="row">${["Build", ...sizes.map(fasterAt), "Mean error", "Agreement", "MB", "Result"].map((title, at) => html`<th key=${title} role="columnheader" scope="col" class=${at > 0 && title !== "Result" ? "number" : ""}>${title}</th>`)}</tr></thead>
      <tbody role="rowgroup">${report.builds.map((row) => html`<tr key=${row.name} role="row"><th role="rowheader" scope="row" class="id">${row.name}</th>
        ${sizes.map((rows) => html`<td key=${rows} role="cell" class="number" data-title=${fasterAt(rows)}>${ratioOf(row, rows, report.threads)}</td>`)}
        <td role="cell" class="number" data-title="Mean error">${row.outputs.length ? small(Math.max(...row.outputs.map((each) => each.meanError ?? Infinity))) : DASH}</td>
        <td role="cell" class="number" data-title="Agreement">${row.agreement ? percent(row.agreement.shown) : DASH}</td>
        <td role="cell" class="number" data-title="MB">${row.bytes ? (row.bytes / 1e6).toFixed(1) : DASH}</td>
        <td role="cell" class="result" data-title="Result">${resultOf(row, serves, report.winner)}</td></tr>`)}</tbody></table>
    ${report.notes.map((each) => html`<p key=${each} class="note muted">${each}</p>`)}
  </section>`;
}

function ratioOf(row, rows, threads) {
  const found = row.ratios.find((each) => each.rows === rows && each.threads === threads);
  if (found && found.high > 4 * found.low) return html`<span class="muted">too noisy to say</span>`;
  return found ? html`${found.middle.toFixed(2)} <span class="muted">${found.low.toFixed(2)}–${found.high.toFixed(2)}</span>` : DASH;
}

function resultOf(row, serves, winner) {
  if (row.name === serves) return "serves";
  if (row.name === winner) return "the best";
  if (row.passed) return "equal";
  return [row.whyNot, ...row.faults].filter(Boolean).slice(0, MORE).join("; ");
}

const fasterAt = (rows) => `Times as fast at ${rows === 1 ? "1 row" : `${rows} rows`}`;
const times = (ratio) => `${ratio.toFixed(2)} ×`;
const percent = (share) => `${(share * 100).toFixed(1)} %`;
const small = (value) => (Number.isFinite(value) ? (value === 0 ? "0" : value.toPrecision(2)) : "not finite");
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
