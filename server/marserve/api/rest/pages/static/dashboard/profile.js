// A model's profile: starts one, shows how far it is, and what the last one showed; its trace can be downloaded.

import { html, useEffect, useRef, useState } from "../vendored/htm-preact.module.js";
import { ask, segment, urlOf, withKey } from "../calls.js";
import { counted, milliseconds } from "./figures.js";
import { Trouble, usePoll } from "./poll.js";
import { ofModel } from "./routes.js";

const EVERY_MS = 1000;
const MOST_REQUESTS = 20_000;
const MOST_SECONDS = 600;
const LISTED = 15;

const PARTS = {
  operators: ["a", "Operators", "of torch"],
  python: ["c", "Python", "and libraries other than torch"],
  waiting: ["e", "Waiting for a processor", "other threads had it"],
  blocked: ["h", "Blocked", "asleep, on a lock, on a file or the network"],
  collections: ["d", "Garbage collections", ""],
  decode: ["b", "Decode", "requests made rows"],
  encode: ["f", "Encode", "answers made bytes"],
  between: ["none", "Between batches", "no work for this worker"],
};
const percent = (share) => `${(share * 100).toFixed(1)} %`;

export function Profile({ route, onKeyWanted, keyRound }) {
  const { name } = route;
  const path = `models/${segment(name)}${route.version ? `/${segment(route.version)}` : ""}/profile`;
  const poll = usePoll((signal) => ask(path, { signal }), { everyMs: EVERY_MS, keys: [path], onKeyWanted, keyRound });
  const [form, setForm] = useState({ way: "requests", count: "50" });
  const [problem, setProblem] = useState("");
  const [isOurs, setOurs] = useState(false);
  const asking = useRef(null);
  useEffect(() => () => { if (asking.current) asking.current.abort(); }, [path]); // the server ends it with the call

  const begin = async () => {
    const fault = faultOf(form);
    setProblem(fault);
    if (fault) return;
    const stop = asking.current = new AbortController();
    setOurs(true);
    setTimeout(poll.again, 100);
    try {
      await ask(`${path}?${form.way}=${Number(form.count)}`, { method: "POST", signal: stop.signal });
    } catch (error) {
      if (error.wantsKey && onKeyWanted) onKeyWanted();
      if (error.name !== "AbortError") setProblem(error.message);
    } finally {
      asking.current = null;
      setOurs(false);
      poll.again();
    }
  };
  const download = async () => {
    setProblem("");
    try {
      const answer = await fetch(urlOf(`${path}/trace`), { headers: withKey(), credentials: "omit", cache: "no-store" });
      if (!answer.ok) throw new Error((await answer.json()).message);
      const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(await answer.blob()), download: "trace.json.gz" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    } catch (error) { setProblem(error.message); }
  };

  const head = html`<p class="crumb"><a href="#/">Overview</a> / <a href=${ofModel(name, route.version)}>${name}</a> /</p>
    <div class="head"><h2 id="page-heading" tabindex="-1">Profile of ${name}</h2></div>`;
  if (poll.isGone) return html`${head}<p class="problem banner" role="alert">${poll.problem}</p><p><a href="#/">All models</a></p>`;
  const { data } = poll;
  const isRunning = isOurs || !!(data && data.isRunning);
  return html`${head}
    <${Trouble} poll=${poll} />
    <section class="panel" aria-label="Make a profile">
      <p class="muted">One worker is measured while it serves. Send the model requests meanwhile.</p>
      ${isRunning ? html`<${Progress} data=${data} form=${isOurs ? form : null} onStop=${isOurs ? () => asking.current && asking.current.abort() : null} />` : html`<${Form} form=${form} onForm=${setForm} onBegin=${begin} />`}
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    </section>
    ${data && data.last ? html`<${Shown} profile=${data.last} onDownload=${download} />` : data && !isRunning && html`<p class="muted">No profile of it is kept.</p>`}`;
}

function faultOf({ way, count }) {
  const most = way === "requests" ? MOST_REQUESTS : MOST_SECONDS;
  return /^\d{1,6}$/.test(count.trim()) && Number(count) >= 1 && Number(count) <= most ? "" : `The number of ${way} is whole, from 1 to ${most}.`;
}

function Form({ form, onForm, onBegin }) {
  return html`<form class="filters" novalidate onSubmit=${(event) => { event.preventDefault(); onBegin(); }}>
    <label class="field">For so many<select value=${form.way} onChange=${(event) => onForm({ way: event.target.value, count: event.target.value === "requests" ? "50" : "5" })}><option value="requests">requests</option><option value="seconds">seconds</option></select></label>
    <label class="field">Number<input inputmode="numeric" value=${form.count} onInput=${(event) => onForm({ ...form, count: event.target.value })} /></label>
    <button class="primary" type="submit">Profile</button></form>`;
}

function Progress({ data, form, onStop }) {
  const got = (data && data.requests) || 0;
  const seconds = (data && data.seconds) || 0;
  const of = form && Number(form.count);
  const reading = data && data.readingSeconds;
  const value = reading != null ? undefined : form ? Math.min(1, (form.way === "requests" ? got : seconds) / of) : undefined;
  return html`<p role="status">${form ? "" : "Another client's profile is under way. "}${counted(got, "request")}${form && form.way === "requests" ? ` of ${of}` : ""}, ${Math.round(seconds)} s${reading != null ? `; reading what was recorded, ${Math.round(reading)} s` : ""}</p>
    <progress value=${value} aria-label="How far the profile is"></progress>
    ${onStop && html`<p class="note"><button type="button" onClick=${onStop}>Give up</button></p>`}`;
}

function Shown({ profile, onDownload }) {
  const { parts, operators, ranks, workers, remarks } = profile;
  return html`
    <section class="panel" aria-labelledby="parts"><h3 id="parts">Where the time went</h3>
      <p>${counted(profile.requests, "request")}${profile.askedRequests ? ` of the ${profile.askedRequests} asked for` : ""} in ${profile.batches} batches, ${(profile.ms / 1000).toFixed(1)} s, <span class="id">${profile.worker}</span>, <span class="muted">${profile.began}</span></p>
      <div class="parts-bar" aria-hidden="true">${parts.filter((each) => each.share > 0).map((each) => html`<i key=${each.name} class=${`line-${(PARTS[each.name] || ["h"])[0]}`} style=${{ width: `${each.share * 100}%` }}></i>`)}</div>
      <table class="figures parts"><caption class="hidden">Parts of the time</caption><thead><tr><th scope="col">Part</th><th scope="col" class="number">Time</th><th scope="col" class="number">Share</th></tr></thead>
        <tbody>${parts.map((each) => {
          const [colour, title, what] = PARTS[each.name] || ["h", each.name, ""];
          return html`<tr key=${each.name}><th scope="row"><i class=${`mark line-${colour}`}></i>${title} <span class="muted">${what}</span></th><td class="number">${milliseconds(each.ms)}</td><td class="number">${percent(each.share)}</td></tr>`;
        })}</tbody></table>
      ${(remarks || []).map((each) => html`<p key=${each} class="note muted">${each}</p>`)}
      ${profile.hasTrace && html`<p class="note"><button type="button" onClick=${onDownload}>Download the trace</button> <span class="muted">trace.json.gz, for ui.perfetto.dev or chrome://tracing</span></p>`}
    </section>
    <section class="panel" aria-labelledby="operators"><h3 id="operators">Operators</h3>
      ${profile.noOperators && html`<p class="muted">None were recorded: ${profile.noOperators}.</p>`}
      ${operators.length > 0 && html`<p class="muted">Recorded in ${profile.recordedBatches} of ${profile.batches} batches; ${counted(profile.threads ?? 1, "thread")} each.</p>
      <table class="figures stack"><caption class="hidden">Operators</caption><thead><tr><th scope="col">Operator</th><th scope="col" class="number">Calls</th><th scope="col" class="number">Own time</th><th scope="col" class="wide">Most of it with shapes</th></tr></thead>
        <tbody>${operators.slice(0, LISTED).map((each) => html`<tr key=${each.name}><th scope="row" class="id">${each.name}</th><td class="number">${each.calls}</td><td class="number">${milliseconds(each.selfMs)}</td><td class="id wide">${each.shapes.length ? each.shapes[0].shapes : ""}</td></tr>`)}</tbody></table>`}
    </section>
    ${ranks && html`<section class="panel" aria-labelledby="ranks"><h3 id="ranks">Ranks</h3>
      <table class="figures stack"><caption class="hidden">Ranks</caption><thead><tr><th scope="col">Rank</th><th scope="col" class="number">Communicated</th><th scope="col" class="number">Computed</th><th scope="col" class="number">Both at once</th><th scope="col" class="number">Idle</th></tr></thead>
        <tbody>${ranks.map((each) => html`<tr key=${each.rank}><th scope="row">${each.rank}</th>${[each.communicationMs, each.computeMs, each.overlapMs, each.idleMs].map((ms, at) => html`<td key=${at} class="number">${milliseconds(ms)}</td>`)}</tr>`)}</tbody></table></section>`}
    ${workers && html`<section class="panel" aria-labelledby="workers"><h3 id="workers">Workers meanwhile</h3>
      <table class="figures stack"><caption class="hidden">Workers</caption><thead><tr><th scope="col">Worker</th><th scope="col" class="number">Requests</th><th scope="col" class="number">A batch, of late</th></tr></thead>
        <tbody>${workers.map((each) => html`<tr key=${each.name}><th scope="row" class="id">${each.name}</th><td class="number">${each.requests}</td><td class="number">${milliseconds(each.meanMs)}</td></tr>`)}</tbody></table></section>`}`;
}
