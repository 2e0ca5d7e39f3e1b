// One model, or workflow: its versions, a form for what it takes, and its answer.

import { html, useEffect, useRef, useState } from "./vendored/htm-preact.module.js";
import { bytes, useObjectUrl } from "./answer.js";
import { Sending, useCall } from "./call.js";
import { ask, segment } from "./calls.js";
import { exampleOf, fieldsOf, firstValue, givenBy, readField, tensorOf } from "./schema.js";

const WAYS = { fields: "Fields", file: "File", json: "JSON", text: "Text", parts: "Parts" };

export function Model({ model, isOpen, isWanted, onKeyWanted, keyRound }) {
  const [open, setOpen] = useState(isOpen);
  const name = model.name;
  const card = useRef(null);
  useEffect(() => { if (isWanted) card.current.scrollIntoView(); }, []);
  return html`<details ref=${card} class="card model" id=${`model-${name}`} open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>
      <h3>${name}</h3>
      ${model.version && html`<span class="muted">version ${model.version}</span>`}
      <span class="end">${model.state ? html`<${State} state=${model.state} />` : html`<span class="muted">workflow</span>`}</span>
    </summary>
    ${open && html`<${Try} model=${model} onKeyWanted=${onKeyWanted} key=${keyRound} />`}
  </details>`;
}

const STATES = {
  ready: ["good", "ready"],
  degraded: ["fair", "degraded"],
  loading: ["fair", "loading…"],
  idle: ["", "idle: no worker yet"],
  failed: ["bad", "failed"],
};

function State({ state }) {
  const [kind, word] = STATES[state] || ["", state];
  return html`<span class=${`state ${kind}`}>${word}</span>`;
}

function Try({ model, onKeyWanted }) {
  const isWorkflow = !model.state;
  const [versions, setVersions] = useState(isWorkflow ? [] : null);
  const [problem, setProblem] = useState("");
  const [version, setVersion] = useState("");
  useEffect(() => {
    if (isWorkflow) return;
    ask(`docs/models/${segment(model.name)}/versions`).then(
      (found) => setVersions(found.versions),
      (error) => { setProblem(error.message); if (error.wantsKey) onKeyWanted(); },
    );
  }, [model.name, model.state]);
  if (problem) return html`<div class="inside"><p class="problem" role="alert">${problem}</p></div>`;
  if (!versions) return html`<div class="inside"><p class="muted">Reading what it takes…</p></div>`;
  const chosen = versions.find((each) => each.version === version) || versions.find((each) => each.isDefault) || {};
  const path = isWorkflow ? `wfpredict/${segment(model.name)}`
    : `predictions/${segment(model.name)}${version ? `/${segment(version)}` : ""}`;
  return html`<div class="inside">
    ${versions.length > 1 && html`<label class="field version">
      <span class="label">Version</span>
      <select value=${version} onChange=${(event) => setVersion(event.currentTarget.value)}>
        <option value="">the default, or as traffic says</option>
        ${versions.map((each) => html`<option value=${each.version}>
          ${each.version}${each.isDefault ? ", the default" : ""}${(each.labels || []).map((label) => `, ${label}`).join("")}: ${each.state}
        </option>`)}
      </select>
    </label>`}
    <${Form} key=${`${chosen.version} ${chosen.declaration ? "declared" : ""}`} name=${model.name} path=${path} version=${chosen} onKeyWanted=${onKeyWanted} />
  </div>`;
}

// The ways to give an input, the likeliest first.
function waysOf(version, fields) {
  const declared = version.declaration;
  if (fields) return declared.kind === "tensors" && fields.length === 1 ? ["fields", "json", "file"] : ["fields", "json"];
  const kind = declared && declared.input ? declared.input.type : version.expects;
  if (declared && { image: 1, bytes: 1, text: 1, json: 1 }[kind])
    return { image: ["file"], bytes: ["file", "text"], text: ["text", "json", "file"], json: ["json", "file"] }[kind];
  if (kind === "image" || kind === "bytes") return ["file", "text", "json", "parts"];
  if (kind === "text") return ["text", "json", "file", "parts"];
  if (kind === "json") return ["json", "file", "text", "parts"];
  return ["json", "file", "text", "parts"];
}

function firstJson(version, fields) {
  if (!version.declaration) return version.expects === "json" ? "[]" : "{}";
  if (fields && version.declaration.kind === "tensors")
    return `{${fields.filter((each) => !each.isOptional).map((each) => `${JSON.stringify(each.name)}: ${firstValue(each)}`).join(", ")}}`;
  const schema = version.declaration.input && version.declaration.input.schema;
  return schema ? JSON.stringify(exampleOf(schema, schema), null, 2) : "{}";
}

const EXPECTED = {
  image: "It takes a picture.",
  bytes: "It takes bytes as they are.",
  text: "It takes text.",
  json: "It takes JSON.",
};

function Form({ name, path, version, onKeyWanted }) {
  const fields = fieldsOf(version.declaration);
  const ways = waysOf(version, fields);
  const declaredInput = version.declaration && version.declaration.input;
  const kind = declaredInput ? declaredInput.type : version.declaration ? "" : version.expects;
  const [way, setWay] = useState(ways[0]);
  const [file, setFile] = useState(null);
  const [text, setText] = useState("");
  const [json, setJson] = useState(() => firstJson(version, fields));
  const [values, setValues] = useState(() => Object.fromEntries((fields || []).map((each) => [each.name, firstValue(each)])));
  const [parts, setParts] = useState([{ name: "data", text: "", file: null }]);
  const call = useCall(onKeyWanted);
  const given = givenBy(version.declaration);
  const output = version.declaration && version.declaration.output;

  function body() {
    if (way === "file") {
      if (!file) throw new Error("No file is chosen yet.");
      const type = /\.npy$/i.test(file.name) ? "application/x-npy" : file.type || "application/octet-stream";
      return { body: file, type, shown: { file: file.name } };
    }
    if (way === "text") return { body: text, type: "text/plain", shown: { text } };
    if (way === "json") {
      try { JSON.parse(json); } catch (error) { throw new Error(`This is not JSON: ${error.message}.`); }
      return { body: json, type: "application/json", shown: { text: json } };
    }
    if (way === "parts") {
      const form = new FormData();
      const named = parts.filter((each) => each.name);
      if (!named.length) throw new Error("No part has a name yet.");
      for (const part of named) form.append(part.name, part.file || part.text);
      return { body: form, type: "", shown: { parts: named.map((each) => ({ name: each.name, ...(each.file ? { file: each.file.name } : { text: each.text }) })) } };
    }
    const members = fields.map((each) => [each, readField(each, values[each.name])]).filter(([, value]) => value !== undefined);
    const made = `{${members.map(([each, value]) => `${JSON.stringify(each.name)}: ${each.kind === "tensor" ? values[each.name].trim() : JSON.stringify(value)}`).join(", ")}}`;
    return { body: made, type: "application/json", shown: { text: made } };
  }
  function make() {
    const { body: sent, type, shown } = body();
    const headers = { ...(type ? { "content-type": type } : {}), ...(output && output.type === "events" ? { accept: "text/event-stream" } : {}) };
    return { request: { method: "POST", path, headers, body: sent }, shown };
  }
  const id = `of-${name}`;
  return html`<form onSubmit=${(event) => event.preventDefault()}
    onKeyDown=${(event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.currentTarget.querySelector("[type=submit]").click(); }}>
    <fieldset class="ways">
      <legend class="hidden">How to give the input</legend>
      ${ways.length > 1 && ways.map((each) => html`<label key=${each}>
        <input type="radio" name=${`${id}-way`} checked=${way === each} onChange=${() => setWay(each)} /><span>${each === "file" && fields ? ".npy file" : WAYS[each]}</span>
      </label>`)}
      <span class="muted hint">${[!fields && EXPECTED[kind], given && `It gives ${given}.`].filter(Boolean).join(" ")}</span>
    </fieldset>
    ${way === "fields" && fields.map((each) => html`<${Field} key=${each.name} field=${each} id=${`${id}-${each.name}`} value=${values[each.name]}
      onValue=${(value) => setValues((before) => ({ ...before, [each.name]: value }))} />`)}
    ${way === "file" && html`<${FileField} file=${file} onFile=${setFile} accept=${fields ? ".npy" : kind === "image" ? "image/*" : ""} label=${kind === "image" ? "Picture" : "File"} />`}
    ${way === "text" && html`<label class="field"><span class="label">Text</span>
      <textarea rows="4" value=${text} onInput=${(event) => setText(event.currentTarget.value)}></textarea></label>`}
    ${way === "json" && html`<label class="field"><span class="label">JSON</span>
      <textarea class="code" rows="6" spellcheck=${false} value=${json} onInput=${(event) => setJson(event.currentTarget.value)}></textarea></label>`}
    ${way === "parts" && html`<${Parts} parts=${parts} onParts=${setParts} />`}
    <${Sending} call=${call} make=${make} label="Send" />
  </form>`;
}

function Field({ field, id, value, onValue }) {
  const common = { id, value, "aria-describedby": `${id}-hint`, onInput: (event) => onValue(event.currentTarget.value) };
  const choices = field.kind === "flag" ? ["true", "false"] : field.kind === "choice" ? field.schema.enum.map(String) : null;
  return html`<div class="field">
    <div class="label"><label for=${id}>${field.name}</label>
      <span class="muted" id=${`${id}-hint`}>${field.hint}${field.isOptional ? " · optional" : ""}</span></div>
    ${choices && html`<select ...${common} onChange=${common.onInput}>
      ${(field.isOptional || field.kind === "choice") && html`<option value=""></option>`}${choices.map((each) => html`<option value=${each}>${each}</option>`)}
    </select>`}
    ${field.kind === "number" && html`<input ...${common} type="number" step=${field.isWhole ? "1" : "any"} />`}
    ${field.kind === "text" && html`<textarea ...${common} rows=${value.length > 80 || value.includes("\n") ? 4 : 1}></textarea>`}
    ${(field.kind === "json" || field.kind === "tensor") && html`<textarea ...${common} class="code" rows="3" spellcheck=${false}></textarea>`}
    ${field.kind === "tensor" && html`<div class="buttons small">
      <button type="button" class="quiet" onClick=${() => onValue(tensorOf(field, false))}>Zeros</button>
      <button type="button" class="quiet" onClick=${() => onValue(tensorOf(field, true))}>Random</button>
    </div>`}
  </div>`;
}

export function FileField({ file, onFile, accept = "", label = "File" }) {
  const [isOver, setOver] = useState(false);
  const input = useRef(null);
  const [pieces, setPieces] = useState(null);
  useEffect(() => setPieces(file && /^image\/(png|jpeg|gif|webp)$/.test(file.type) ? [file] : null), [file]);
  const url = useObjectUrl(pieces, file ? file.type : "");
  const stop = (event) => { event.preventDefault(); event.stopPropagation(); };
  return html`<label class=${`field drop ${isOver ? "over" : ""}`}
    onDragOver=${(event) => { stop(event); setOver(true); }} onDragLeave=${() => setOver(false)}
    onDrop=${(event) => { stop(event); setOver(false); if (event.dataTransfer.files.length) onFile(event.dataTransfer.files[0]); }}>
    <input type="file" ref=${input} accept=${accept} aria-label=${label} onChange=${(event) => onFile(event.currentTarget.files[0] || null)} />
    ${url ? html`<img src=${url} alt="" />` : html`<svg viewBox="0 0 24 24" aria-hidden="true"><path d="M12 15V4m0 0L8 8m4-4 4 4M4 15v4a1 1 0 0 0 1 1h14a1 1 0 0 0 1-1v-4" /></svg>`}
    <span>${file ? html`<strong>${file.name}</strong><br /><span class="muted">${bytes(file.size)}. Choose another, or drop it here.</span>`
      : html`<strong>Choose a ${label.toLowerCase()}</strong><br /><span class="muted">or drop it here</span>`}</span>
  </label>`;
}

function Parts({ parts, onParts }) {
  const change = (index, values) => onParts(parts.map((each, at) => (at === index ? { ...each, ...values } : each)));
  return html`<div class="field">
    <p class="muted">Named parts of one request (multipart/form-data); each is text or a file.</p>
    ${parts.map((part, index) => html`<div class="part" key=${index}>
      <input aria-label=${`Name of part ${index + 1}`} placeholder="name" value=${part.name} onInput=${(event) => change(index, { name: event.currentTarget.value })} />
      <input aria-label=${`Text of part ${index + 1}`} placeholder="text" value=${part.text} disabled=${!!part.file} onInput=${(event) => change(index, { text: event.currentTarget.value })} />
      <input type="file" aria-label=${`File of part ${index + 1}`} onChange=${(event) => change(index, { file: event.currentTarget.files[0] || null })} />
      ${parts.length > 1 && html`<button type="button" class="quiet" aria-label=${`Remove part ${index + 1}`} onClick=${() => onParts(parts.filter((_, at) => at !== index))}>Remove</button>`}
    </div>`)}
    <button type="button" class="quiet" onClick=${() => onParts([...parts, { name: "", text: "", file: null }])}>Add a part</button>
  </div>`;
}
