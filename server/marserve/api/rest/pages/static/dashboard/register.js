// Registers a model: an archive that is sent, an address, or a file of the model store; shows how far it is.

import { html, useEffect, useReducer, useRef, useState } from "../vendored/htm-preact.module.js";
import { ask, segment, urlOf } from "../calls.js";
import { Copied } from "./copied.js";
import { Lines } from "./explained.js";
import { bytes } from "./figures.js";
import { Registration } from "./registering.js";
import { ofModel } from "./routes.js";

const MOST_WORKERS = 1000;
const OTHER_THERE = 409;

// It goes on while other pages are looked at, and is shown again here.
let current = null;
let told = () => {};

const isWhole = (text, least, most) => /^\d{1,9}$/.test(text) && Number(text) >= least && Number(text) <= most;
const EMPTY = { way: "file", file: null, storedAs: "", address: "", modelName: "", workers: "1", batchSize: "", replaces: false };

export function Register({ onKeyWanted, keyRound }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [form, setForm] = useState(EMPTY);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    told = redraw;
    // A file that is dropped beside its place would be opened in place of this page.
    const keep = (event) => event.preventDefault();
    addEventListener("dragover", keep);
    addEventListener("drop", keep);
    return () => {
      told = () => {};
      removeEventListener("dragover", keep);
      removeEventListener("drop", keep);
    };
  }, []);
  useEffect(() => { setProblem(""); }, [keyRound]);

  const begin = (wanted) => {
    const fault = faultOf(wanted);
    setProblem(fault);
    if (fault) return;
    const parameters = { initial_workers: Number(wanted.workers) };
    if (wanted.modelName.trim()) parameters.model_name = wanted.modelName.trim();
    if (wanted.batchSize) parameters.batch_size = Number(wanted.batchSize);
    const isFile = wanted.way === "file";
    const order = { file: isFile ? wanted.file : null, storedAs: isFile ? wanted.storedAs.trim() : "", address: isFile ? "" : wanted.address.trim(), replaces: wanted.replaces, parameters, form: wanted };
    current = new Registration(order, () => told());
    guardLeaving(current, isFile);
    current.run().then(() => { if (current && current.error && current.error.wantsKey) onKeyWanted(); });
    told();
  };
  const reset = (next = EMPTY) => { current = null; setForm(next); told(); };

  return html`
    <div class="head"><h2 id="page-heading" tabindex="-1">Register a model</h2></div>
    ${current ? html`<${Course} registration=${current} onAgain=${() => reset()} onChangeForm=${() => reset(current.order.form)} onReplace=${() => begin({ ...current.order.form, replaces: true })} />`
      : html`<${Form} form=${form} onForm=${setForm} problem=${problem} onBegin=${() => begin(form)} />`}`;
}

// The browser asks before the page is left during an upload: with it the upload would end.
function guardLeaving(registration, isFile) {
  if (!isFile) return;
  const warn = (event) => { if (registration.state === "running" && !registration.isSent) event.preventDefault(); };
  addEventListener("beforeunload", warn);
  const changed = registration.onChange;
  registration.onChange = () => {
    if (registration.isSent || registration.state !== "running") removeEventListener("beforeunload", warn);
    changed();
  };
}

function faultOf({ way, file, storedAs, address, workers, batchSize }) {
  if (way === "file" && !file) return "Choose a file.";
  if (way === "file" && !file.size) return `${file.name} is empty.`;
  if (way === "file" && !storedAs.trim()) return "The file needs a name in the model store.";
  if (way === "address" && !address.trim()) return "Enter an address, or the name of a file in the model store.";
  if (!isWhole(workers, 0, MOST_WORKERS)) return `The number of workers is whole, from 0 to ${MOST_WORKERS}.`;
  if (batchSize && !isWhole(batchSize, 1, 999999999)) return "The batch size is a whole number from 1.";
  return "";
}

function Form({ form, onForm, problem, onBegin }) {
  const change = (member) => (event) => onForm({ ...form, [member]: event.currentTarget.value });
  const way = (name, label) => html`<label><input type="radio" name="way" value=${name} checked=${form.way === name} onChange=${() => onForm({ ...form, way: name })} /><span>${label}</span></label>`;
  return html`<form class="panel register" onSubmit=${(event) => { event.preventDefault(); onBegin(); }}>
    <fieldset class="ways"><legend class="hidden">Where the archive is</legend>${way("file", "A file of this machine")}${way("address", "An address, or the store")}</fieldset>
    ${form.way === "file" ? html`<${Drop} form=${form} onForm=${onForm} />` : html`
      <label class="field"><span class="label">Archive <span class="muted">an address that <code>allowed_urls</code> allows, or a file's name in the model store</span></span>
        <input value=${form.address} spellcheck=${false} autocomplete="off" placeholder="digits.mar" onInput=${change("address")} /></label>`}
    <div class="grid">
      <label class="field"><span class="label">Model's name <span class="muted">else the archive's</span></span><input value=${form.modelName} spellcheck=${false} autocomplete="off" onInput=${change("modelName")} /></label>
      <label class="field"><span class="label">Workers <span class="muted">0 loads nothing yet</span></span><input inputmode="numeric" value=${form.workers} onInput=${change("workers")} /></label>
      <label class="field"><span class="label">Batch size <span class="muted">else the archive's</span></span><input inputmode="numeric" value=${form.batchSize} onInput=${change("batchSize")} /></label>
    </div>
    ${form.way === "file" && html`<label class="check"><input type="checkbox" checked=${form.replaces} onChange=${(event) => onForm({ ...form, replaces: event.currentTarget.checked })} /> Replace a file of this name that no version uses</label>`}
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <div class="buttons"><button type="submit" class="primary">Register</button></div>
    <p class="muted note">An archive is checked before it is kept, and a model that cannot be loaded is not registered. All other options are at <a href=${urlOf("docs")}>docs</a> (<code>POST /models</code>).</p>
  </form>`;
}

function Drop({ form, onForm }) {
  const [isOver, setOver] = useState(false);
  const take = (event) => {
    const file = event.currentTarget.files[0] || null;
    onForm({ ...form, file, storedAs: file ? file.name : "" });
  };
  return html`
    <label class=${`field drop ${isOver ? "over" : ""}`} onDragEnter=${() => setOver(true)} onDragLeave=${() => setOver(false)} onDrop=${(event) => { event.stopPropagation(); setOver(false); }} onDragOver=${(event) => event.stopPropagation()}>
      <input type="file" accept=".mar,.model,.tar.gz,.tgz,.gz" aria-label="Archive" onChange=${take} />
      <svg viewBox="0 0 24 24" aria-hidden="true"><path d="M12 16V4m0 0 4.5 4.5M12 4 7.5 8.5M4 15v3.5A1.5 1.5 0 0 0 5.5 20h13a1.5 1.5 0 0 0 1.5-1.5V15" /></svg>
      <span>${form.file ? html`<strong>${form.file.name}</strong><br /><span class="muted">${bytes(form.file.size)}; choose or drop another</span>` : html`<strong>Choose an archive</strong>, or drop it here<br /><span class="muted">.mar, .model, .tar.gz or .tgz</span>`}</span></label>
    ${form.file && html`<label class="field"><span class="label">Its name in the model store</span><input value=${form.storedAs} spellcheck=${false} autocomplete="off" onInput=${(event) => onForm({ ...form, storedAs: event.currentTarget.value })} /></label>`}`;
}

const WORDS = { waiting: "waits", now: "under way", done: "done", failed: "failed", cancelled: "cancelled" };

function Course({ registration, onAgain, onChangeForm, onReplace }) {
  const { state, steps, message, error, lines, notes, registered, order, isCancelling, isSent } = registration;
  const [takesRequests, setTakesRequests] = useState(false); // whether models can be tried at this address
  useEffect(() => { ask("").then((card) => setTakesRequests(!!card.links.predictions), () => {}); }, []);
  const box = useRef(null);
  useEffect(() => { box.current.focus({ preventScroll: true }); }, [registration, state]);
  const now = steps.find((each) => each.state === "now");
  const part = now && now.part !== null ? `, ${Math.floor(now.part * 4) * 25} %` : "";
  const spoken = state === "running" ? (isCancelling ? "Cancelling" : now ? `${now.name}${part}` : "") : "";
  const isTaken = state === "failed" && error && error.status === OTHER_THERE && order.file && !isSent && !order.replaces;
  return html`<section class="panel" ref=${box} tabindex="-1" aria-labelledby="course-title">
    <h3 id="course-title">${order.file ? order.storedAs : order.address.split("?")[0]}${order.parameters.model_name ? ` as ${order.parameters.model_name}` : ""}</h3>
    <ol class="steps">${steps.map((each) => html`<li key=${each.name} class=${each.state}>
      <span class="mark" aria-hidden="true"></span><span class="name">${each.name} <span class="hidden">${WORDS[each.state]}</span></span><span class="muted what">${each.text}</span>
      ${each.state === "now" && html`<progress max="1" value=${each.part === null ? undefined : each.part} aria-label=${each.name}></progress>`}</li>`)}</ol>
    <span class="hidden" role="status">${spoken}</span>
    ${state === "running" && html`<div class="buttons"><button type="button" disabled=${isCancelling} onClick=${() => registration.cancel()}>${isCancelling ? "Cancelling…" : "Cancel"}</button></div>`}
    ${state === "done" && html`<div role="status"><p><span class=${`pill ${registered.isWhole ? "good" : "fair"}`}>${registered.isWhole ? "ready" : "loading"}</span> ${message}</p>
      <p class="buttons"><a class="button primary" href=${ofModel(registered.modelName, registered.modelVersion)}>Its page</a>${takesRequests && html`<a class="button" href=${`${urlOf("docs")}#${segment(registered.modelName)}`}>Try it</a>`}</p>
      ${!takesRequests && html`<p class="muted note">It can be tried at <code>/docs</code> of the address that takes requests.</p>`}</div>`}
    ${state === "failed" && html`<div role="alert" class="problem banner"><span>${message}</span></div>`}
    ${state === "cancelled" && html`<p role="status">It is cancelled${registration.isOrdered ? ", and nothing is registered" : ""}.</p>`}
    ${notes.map((each) => html`<p key=${each} class="muted note">${each}</p>`)}
    ${state === "failed" && lines.length > 0 && html`<h4>What the log says of it</h4><${Lines} lines=${lines} /><${Copied} text=${`marserve logs --request ${registration.requestId}`} what="The same in a terminal" />`}
    ${state !== "running" && html`<div class="buttons">
      ${isTaken && html`<button type="button" class="danger" onClick=${onReplace}>Replace that file</button>`}
      ${state !== "done" && html`<button type="button" onClick=${onChangeForm}>Change it</button>`}
      <button type="button" onClick=${onAgain}>Register another</button></div>`}
  </section>`;
}
