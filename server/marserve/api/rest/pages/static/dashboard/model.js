// A model: its charts, versions and their shares of requests, roll-out, workers, what failed, slow requests, log.

import { html, useRef } from "../vendored/htm-preact.module.js";
import { ask, segment, urlOf } from "../calls.js";
import { Chart, LATENCY, RATE } from "./charts.js";
import { bytes, counted, DASH, isNumber, milliseconds, rate, rounded } from "./figures.js";
import { Logs } from "./logs.js";
import { State } from "./overview.js";
import { Trouble, usePoll } from "./poll.js";
import { Rollout } from "./rollout.js";
import { hashOf, ofModel, ofOptimise, ofProfile, ofRequest } from "./routes.js";
import { rowOf, Samples } from "./samples.js";
import { Weights } from "./versions.js";
import { Workers } from "./workers.js";

const EVERY_MS = 2000;
const SELDOM_MS = 5000;
const SLOWEST = 8;

// What a mean request spends its time with, in order; the first has what the server reads before a request waits.
const STAGES = [
  ["arrive", "h", ["header", "body", "admit"]], ["queue", "c", ["queue"]], ["send", "g", ["send"]], ["decode", "d", ["decode"]],
  ["handle", "a", ["handle"]], ["encode", "e", ["encode"]], ["return", "f", ["return"]], ["write", "b", ["write"]],
];
const STAGE_SERIES = STAGES.map(([name, colour]) => ({ name, colour, read: (row) => row.stages && row.stages[name] }));

// Milliseconds of each stage for a request, on average, of those that had it since the answer before; null without any.
function stagesBetween(before, after) {
  if (!before) return null;
  const old = Object.fromEntries(before.map((each) => [each.name, each]));
  const means = {};
  for (const { name, count, milliseconds: sum } of after) {
    const had = old[name] || { count: 0, milliseconds: 0 };
    if (count < had.count) return null;
    if (count > had.count) means[name] = Math.max(0, (sum - had.milliseconds) / (count - had.count));
  }
  if (!Object.keys(means).length) return null;
  return Object.fromEntries(STAGES.map(([group, , names]) => [group, names.reduce((all, name) => all + (means[name] || 0), 0)]));
}

export function Model({ route, onKeyWanted, keyRound }) {
  const { name } = route;
  const path = `models/${segment(name)}`;
  const histories = useRef({});
  const poll = usePoll(async (signal) => {
    const described = await ask(`${path}/all`, { signal });
    const stats = await ask(`${path}/stats`, { signal });
    const traffic = await ask(`${path}/traffic`, { signal });
    const old = histories.current;
    histories.current = {};
    for (const { modelVersion, times, stages } of stats.versions) {
      const history = old[modelVersion] || new Samples(4 * (EVERY_MS / 1000));
      const before = history.last;
      history.add({ ...rowOf(before, times, stats.at), stages: stagesBetween(before && before.sofar, stages), sofar: stages });
      histories.current[modelVersion] = history;
    }
    return { described, stats: Object.fromEntries(stats.versions.map((each) => [each.modelVersion, each])), traffic };
  }, { everyMs: EVERY_MS, keys: [name], onKeyWanted, keyRound });
  const further = usePoll(async (signal) => {
    const { rollouts } = await ask("rollouts", { signal });
    const rollout = rollouts.some((each) => each.modelName === name) ? await ask(`${path}/rollout`, { signal }) : null;
    let slow = null; // where the server has no recorder
    try {
      slow = (await ask(`requests?model=${segment(name)}&limit=${SLOWEST}`, { signal })).requests;
    } catch (error) {
      if (error.status !== 404) throw error;
    }
    return { rollout, slow };
  }, { everyMs: SELDOM_MS, keys: [name], keyRound });
  const { data } = poll;
  const again = () => { poll.again(); further.again(); };

  if (poll.isGone) return html`<${Head} name=${name} /><p class="problem banner" role="alert">${poll.problem}</p><p><a href="#/">All models</a></p>`;
  if (!data) return html`<${Head} name=${name} /><${Trouble} poll=${poll} />${!poll.problem && html`<p class="muted">Reading the model…</p>`}`;
  const versions = data.described;
  const version = versions.find((each) => each.modelVersion === route.version) || versions.find((each) => each.isDefault) || versions[0];
  const isUnknown = route.version && version.modelVersion !== route.version && !(version.labels || []).includes(route.version);
  const samples = histories.current[version.modelVersion] || new Samples(1);
  const rollout = further.data && further.data.rollout;
  return html`
    <${Head} name=${name} version=${version} />
    <${Trouble} poll=${poll} />
    ${isUnknown && html`<p class="problem banner" role="alert">${name} has no version of this name; shown is ${version.modelVersion}.</p>`}
    <div class=${poll.isOld ? "old" : ""}>
    ${versions.length > 1 && html`<nav aria-label="Versions"><ul class="choice">${versions.map((each) => html`<li key=${each.modelVersion}><a href=${ofModel(name, each.modelVersion)} aria-current=${each === version ? "true" : undefined}>${each.modelVersion}${each.isDefault ? " · default" : ""}</a></li>`)}</ul></nav>`}
    ${(version.warnings || []).length > 0 && html`<ul class="reasons">${version.warnings.map((each) => html`<li key=${each}>${each}</li>`)}</ul>`}
    <${Facts} version=${version} stats=${data.stats[version.modelVersion]} />
    <div class="charts" key=${version.modelVersion}>
      <${Chart} title="Rate" samples=${samples} series=${RATE} format=${rate} />
      <${Chart} title="From arrival to answer" samples=${samples} series=${LATENCY} format=${milliseconds} />
      <div class="wide-chart"><${Chart} title="Stages of a request, on average" samples=${samples} series=${STAGE_SERIES} format=${milliseconds} isStacked=${true} /></div>
    </div>
    ${rollout && html`<section class="panel" aria-labelledby="rollout"><h3 id="rollout">Roll-out</h3><${Rollout} name=${name} rollout=${rollout} onKeyWanted=${onKeyWanted} onChanged=${again} /></section>`}
    <section class="panels" aria-label="Versions and workers">
      <div><div class="panel"><h3>Shares of requests</h3><${Weights} name=${name} versions=${versions.map((each) => each.modelVersion)} traffic=${data.traffic} rollout=${rollout} onKeyWanted=${onKeyWanted} onChanged=${again} /></div>
      <div class="panel"><h3>Workers of ${version.modelVersion}</h3><${Workers} key=${version.modelVersion} version=${version} onKeyWanted=${onKeyWanted} onChanged=${again} /></div></div>
      <div><div class="panel"><h3>What failed</h3><${Failures} stats=${data.stats[version.modelVersion]} name=${name} /></div>
      <div class="panel"><h3>Slowest requests</h3><${Slowest} further=${further} name=${name} /></div></div>
    </section>
    <section class="panel" aria-labelledby="logs"><${Logs} name=${name} onKeyWanted=${onKeyWanted} keyRound=${keyRound} /></section>
    </div>`;
}

function Head({ name, version }) {
  return html`<p class="crumb"><a href="#/">Overview</a> /</p>
    <div class="head"><h2 id="page-heading" tabindex="-1">${name}</h2>
      ${version && html`<${State} state=${version.state} /><span class="hidden" role="status">${name} ${version.modelVersion} is ${version.state}</span>
        <a class="end" href=${ofProfile(name, version.modelVersion)}>Profile</a>
        <a href=${ofOptimise(name, version.modelVersion)}>Builds</a>
        <a href=${urlOf("docs")}>Routes in docs</a>`}</div>`;
}

function Facts({ version, stats }) {
  const minute = (stats && stats.lastMinute) || null;
  const queue = version.jobQueueStatus || {};
  const tiles = [
    ["Answers/s", minute ? rate(minute.answersPerSecond) : DASH, "last minute"],
    ["p99", minute ? milliseconds(minute.milliseconds.total.p99) : DASH, "last minute"],
    ["Waiting", String(queue.pendingRequests ?? DASH), `${version.jobQueueSize} may wait`],
    ["Running", String(version.runningRequests), `${counted(version.workers.filter((each) => each.status === "READY").length, "worker")} ready`],
    ["Batch", minute && isNumber(minute.meanBatch) ? rounded(minute.meanBatch) : DASH, `of ${version.batchSize}, ${version.maxBatchDelay} ms`],
    ...(version.flops?.state === "counted" ? [ofPeak(version, minute)] : []),
    ["Memory", bytes(version.workers.reduce((all, each) => all + each.memoryUsage, 0)), "of its workers"],
  ];
  return html`<dl class="tiles">${tiles.map(([name, value, more]) => html`<div key=${name} class="card"><dt>${name}</dt><dd>${value}</dd><dd class="muted">${more}</dd></div>`)}</dl>`;
}

// Which share of what its ready workers' devices could do the last minute's batches took.
function ofPeak({ flops, workers }, minute) {
  const ready = workers.filter((each) => each.status === "READY").length;
  if (!minute || !ready || !(minute.seconds > 0)) return ["Of the peak", DASH, "FLOPs, last minute"];
  const done = minute.batches * (flops.perBatch + flops.perRequest * (minute.meanBatch || 0));
  const available = minute.seconds * ready;
  const share = (100 * done) / (available * flops.peakPerSecond);
  return ["Of the peak", share > 0 && share < 0.01 ? "< 0.01 %" : `${rounded(share)} %`, `FLOPs; busy ${rounded((100 * minute.busyWorkers) / ready)} %`];
}

const WINDOWS = [["lastMinute", "1 min"], ["last5Minutes", "5 min"], ["last60Minutes", "60 min"], ["sinceStart", "Start"]];

function Failures({ stats, name }) {
  const windows = WINDOWS.filter(([member]) => stats && stats[member]);
  const kinds = [["errors", "failed"], ["refused", "refused"], ["workerDeaths", "worker died"]];
  const rows = kinds.flatMap(([member, word]) => {
    const causes = [...new Set(windows.flatMap(([window]) => Object.keys(stats[window][member] || {})))].sort();
    return causes.map((cause) => [`${word}: ${cause}`, windows.map(([window]) => (stats[window][member] || {})[cause] || 0)]);
  });
  if (!rows.length) return html`<p class="muted">Nothing failed since the version was registered.</p>`;
  return html`<table class="figures"><caption class="hidden">Failures by cause and time</caption><thead><tr><th scope="col">Cause</th>${windows.map(([, title]) => html`<th key=${title} scope="col" class="number">${title}</th>`)}</tr></thead>
    <tbody>${rows.map(([cause, counts]) => html`<tr key=${cause}><th scope="row">${cause}</th>${counts.map((each, index) => html`<td key=${index} class="number">${each.toLocaleString("en")}</td>`)}</tr>`)}</tbody></table>
    <p class="note"><a href=${`${hashOf("requests")}?model=${segment(name)}&failed=true`}>Failed requests</a></p>`;
}

function Slowest({ further, name }) {
  if (!further.data) return html`<p class="muted">${further.problem || "Reading the recorder…"}</p>`;
  const { slow } = further.data;
  if (!slow) return html`<p class="muted">This server records no requests.</p>`;
  if (!slow.length) return html`<p class="muted">No request of it is recorded.</p>`;
  return html`<table class="figures stack"><caption class="hidden">Slowest recorded requests</caption><thead><tr><th scope="col">Request</th><th scope="col" class="number">Took</th><th scope="col">Cause</th><th scope="col" class="number wide">Status</th></tr></thead>
    <tbody>${slow.map((each, index) => html`<tr key=${`${each.id} ${index}`}><th scope="row"><a class="id" href=${ofRequest(each.id)}>${each.id}</a></th><td class="number">${milliseconds(each.wall_ms)}</td><td title=${each.why}>${each.cause}</td><td class="number wide">${each.status}</td></tr>`)}</tbody></table>
    <p class="note"><a href=${`${hashOf("requests")}?model=${segment(name)}`}>All recorded requests</a></p>`;
}
