// The course of a roll-out: its steps, what its judge found and by which counts, what happened, and orders to it.

import { html, useState } from "../vendored/htm-preact.module.js";
import { ask, segment } from "../calls.js";
import { Confirm } from "./confirm.js";
import { DASH, isNumber, milliseconds, percent, rounded } from "./figures.js";

const MOST_EVENTS = 30;
const ORDERS = {
  pause: "It goes no further; if the version is worse it is still rolled back.",
  resume: "It goes on at its step.",
  abort: "The version that served before serves everything again.",
  promote: "The new version answers everything from now on, whatever the judge has found.",
};
const TONES = { promoted: "good", "rolled back": "bad", aborted: "bad" };
const STANDINGS = { worse: "bad", "not worse": "good" };

export function Rollout({ name, rollout, onKeyWanted, onChanged }) {
  const [order, setOrder] = useState("");
  const { state, spec, verdict, counts } = rollout;
  const isRunning = ["preparing", "running", "paused"].includes(state);
  const orders = !isRunning ? [] : [state === "paused" ? "resume" : "pause", "promote", "abort"];
  const events = [...rollout.events].reverse().slice(0, MOST_EVENTS);
  const reached = isNumber(rollout.share) ? Math.min(100, Math.max(0, rollout.share)) : 0;
  return html`
    <p><strong>${rollout.modelVersion}</strong> in the place of <strong>${rollout.baseline}</strong>: <span class=${`pill ${TONES[state] || ""}`}>${state}</span> ${rollout.reason}</p>
    <span class="hidden" role="status">Roll-out: ${state}</span>
    <div class="progress" role="progressbar" aria-label="Share of the new version" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(reached)}><span style=${{ width: `${reached}%` }}></span></div>
    <p class="muted note">Steps: ${(spec.steps || []).map((each, index) => html`<span key=${index}>${index ? " → " : ""}${index === rollout.step && isRunning ? html`<strong>${each} %</strong>` : `${each} %`}</span>`)}${isNumber(rollout.elapsedSeconds) ? `; ${Math.round(rollout.elapsedSeconds)} s of at least ${rounded(rollout.holdSeconds)} s in this one` : ""}</p>
    ${counts && html`<table class="figures"><caption class="hidden">What both versions did in this step</caption><thead><tr><th scope="col">Version</th><th scope="col" class="number">Requests</th><th scope="col" class="number">Errors</th><th scope="col" class="number">Rejections</th></tr></thead>
      <tbody>${[["candidate", rollout.modelVersion], ["baseline", rollout.baseline]].map(([arm, version]) => html`<tr key=${arm}><th scope="row">${version}</th><td class="number">${counts[arm].requests}</td><td class="number">${counts[arm].errors}</td><td class="number">${counts[arm].rejections}</td></tr>`)}</tbody></table>`}
    ${rollout.answers && html`<p class="muted note">Compared answers: ${rollout.answers.compared}, of which ${rollout.answers.differing} differed.</p>`}
    ${verdict && html`<h4>What its judge found: ${verdict.decision}</h4><p class="muted note">${verdict.reason}</p>
      <${Findings} findings=${verdict.findings || []} />`}
    ${orders.length > 0 && html`<div class="buttons">${orders.map((each) => html`<button key=${each} type="button" class=${each === "abort" ? "danger" : ""} onClick=${() => setOrder(each)}>${each[0].toUpperCase()}${each.slice(1)}…</button>`)}</div>`}
    <details class="more"><summary>What happened: ${rollout.events.length}</summary><ol class="changes">${events.map((each, index) => html`<li key=${index}><time class="muted">${new Date(each.at * 1000).toLocaleString("en", { hour12: false })}</time> ${each.event}${each.reason ? `: ${each.reason}` : ""}${each.verdict && html`<details class="more"><summary>Evidence</summary><${Findings} findings=${each.verdict.findings || []} /></details>`}</li>`)}</ol></details>
    ${order && html`<${Confirm} key=${order} title=${`${order[0].toUpperCase()}${order.slice(1)} the roll-out of ${name}`} label=${`${order[0].toUpperCase()}${order.slice(1)} it`} changes=${[ORDERS[order]]} onKeyWanted=${onKeyWanted}
      carryOut=${() => ask(`models/${segment(name)}/rollout/${order}`, { method: "PUT" })} onEnd=${(isDone) => { setOrder(""); if (isDone) onChanged(); }} />`}`;
}

function Findings({ findings }) {
  if (!findings.length) return null;
  const share = (value) => (isNumber(value) ? percent(value) : DASH);
  return html`<table class="figures stack"><caption class="hidden">Evidence by measure</caption><thead><tr><th scope="col">Measure</th><th scope="col">Standing</th><th scope="col" class="number">New</th><th scope="col" class="number">Before</th><th scope="col" class="number wide">New, at least</th><th scope="col" class="number wide">Before, at most</th><th scope="col" class="number wide">Allowed more</th></tr></thead>
    <tbody>${findings.map((each) => html`<tr key=${each.measure}><th scope="row">${each.measure}${isNumber(each.limitSeconds) ? ` (slower than ${milliseconds(1000 * each.limitSeconds)})` : ""}</th><td><span class=${`state ${STANDINGS[each.standing] || ""}`}>${each.standing}</span></td>
      <td class="number">${share(each.candidate)}</td><td class="number">${share(each.baseline)}</td><td class="number wide">${share(each.candidateAtLeast)}</td><td class="number wide">${share(each.baselineAtMost)}</td><td class="number wide">${share(each.limit)}</td></tr>
      ${each.reason && html`<tr class="why said"><td colspan="7">${each.reason}</td></tr>`}`)}</tbody></table>`;
}
