// Every route of the port, from its API description, each with a form.

import { html, useMemo, useState } from "./vendored/htm-preact.module.js";
import { Sending, useCall } from "./call.js";
import { segment } from "./calls.js";
import { FileField } from "./model.js";
import { exampleOf, plain, resolve, wordOf } from "./schema.js";

const METHODS = ["get", "post", "put", "patch", "delete", "options", "head"];
const DEEPEST = 4;

// A sentence with its words between backticks as code.
const sentence = (text) => String(text || "").split("`").map((word, index) => (index % 2 ? html`<code>${word}</code>` : word));

// What people come for first: predictions, then models; probes, older forms and the pages themselves last.
function placeOf({ path, operation }) {
  if (path === "/" || /^\/(docs|openapi\.json|api-description)\b/.test(path)) return 5;
  if (/older form/.test(operation.summary)) return 4;
  if (/^\/(ping|livez|readyz|startupz)$/.test(path)) return 3;
  return path.startsWith("/predictions/") ? 0 : path === "/models" || path.startsWith("/models/") ? 1 : 2;
}

// Paths of one model are left out: each has a form among the models, and the path of any model is here.
export function routesOf(description) {
  const routes = Object.entries(description.paths || {}).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method] && !("x-marserve-model" in item[method])).map((method) => ({ path, method: method.toUpperCase(), operation: item[method] })));
  return routes.sort((one, other) => placeOf(one) - placeOf(other) || (placeOf(one) === 1 && one.path.localeCompare(other.path)) || 0);
}

export function Routes({ description, models, onKeyWanted }) {
  const [sought, setSought] = useState("");
  const routes = useMemo(() => routesOf(description), [description]);
  const words = sought.toLowerCase().split(/\s+/).filter(Boolean);
  const found = routes.filter(({ path, method, operation }) => {
    const text = `${method} ${path} ${operation.summary || ""}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  return html`<section aria-labelledby="routes">
    <div class="head"><h2 id="routes">Routes</h2>
      <input type="search" class="filter" aria-label="Find a route" placeholder=${`Find one of ${routes.length}`} value=${sought} onInput=${(event) => setSought(event.currentTarget.value)} />
    </div>
    <datalist id="model-names">${models.map((each) => html`<option value=${each.name}></option>`)}</datalist>
    <div class="list">${found.map((route) => html`<${Route} key=${`${route.method} ${route.path}`} route=${route} root=${description} onKeyWanted=${onKeyWanted} />`)}</div>
    ${!found.length && html`<p class="muted">No route has these words.</p>`}
  </section>`;
}

function Route({ route, root, onKeyWanted }) {
  const [isOpen, setOpen] = useState(false);
  const { path, method, operation } = route;
  return html`<details class="route" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>
      <span class=${`method ${method.toLowerCase()}`}>${method}</span>
      <code class="path">${path.split(/(\{[^}]*\})/).map((word) => (word[0] === "{" ? html`<i>${word}</i>` : html`${word}<wbr />`))}</code>
      <span class="summary">${sentence(operation.summary)}${operation.deprecated ? " (an older form)" : ""}</span>
    </summary>
    ${isOpen && html`<${Operation} route=${route} root=${root} onKeyWanted=${onKeyWanted} />`}
  </details>`;
}

function Operation({ route, root, onKeyWanted }) {
  const { path, method, operation } = route;
  const parameters = (operation.parameters || []).map((each) => resolve(each, root)).filter((each) => ["path", "query", "header"].includes(each.in));
  const content = operation.requestBody ? resolve(operation.requestBody, root).content || {} : null;
  const jsonSchema = content && content["application/json"] && content["application/json"].schema;
  const takesFile = !!content && ("*/*" in content || "application/octet-stream" in content);
  const takesText = !!content && !("application/octet-stream" in content);
  const [values, setValues] = useState({});
  const [text, setText] = useState(() => (jsonSchema && resolve(operation.requestBody, root).required ? JSON.stringify(exampleOf(jsonSchema, root), null, 2) : ""));
  const [file, setFile] = useState(null);
  const call = useCall(onKeyWanted);
  const keyOf = (each) => `${each.in} ${each.name}`;

  function make() {
    let filled = path;
    const query = [];
    const headers = {};
    for (const each of parameters) {
      const value = values[keyOf(each)] || (each.in === "path" && each.name === "file" && file ? file.name : "");
      if (each.in === "path") {
        if (!value) throw new Error(`${each.name} is empty.`);
        filled = filled.replace(`{${each.name}}`, () => segment(value));
      } else if (value) {
        if (each.in === "query") query.push([each.name, value]);
        else headers[each.name] = value;
      }
    }
    const request = { method, path: filled, query, headers };
    if (content && file) return { request: { ...request, headers: { ...headers, "content-type": file.type || "application/octet-stream" }, body: file }, shown: { file: file.name } };
    if (content && text) {
      const isJson = /^\s*[[{]/.test(text) || (jsonSchema && !content["application/yaml"]);
      const type = isJson ? "application/json" : content["application/yaml"] ? "application/yaml" : "text/plain";
      return { request: { ...request, headers: { ...headers, "content-type": type }, body: text }, shown: { text } };
    }
    return { request };
  }
  const groups = [["path", "In the path"], ["query", "In the query"], ["header", "In the header"]];
  return html`<form class="inside" onSubmit=${(event) => event.preventDefault()}>
    ${operation.description && html`<p>${sentence(operation.description)}</p>`}
    ${groups.map(([where, title]) => {
      const of = parameters.filter((each) => each.in === where);
      if (!of.length) return null;
      const inputs = html`<div class="grid">${of.map((each) => html`<${Parameter} key=${keyOf(each)} parameter=${each} root=${root} value=${values[keyOf(each)] || ""}
        onValue=${(value) => setValues((before) => ({ ...before, [keyOf(each)]: value }))} />`)}</div>`;
      return where === "path" ? inputs : html`<details class="more"><summary>${title}: ${of.length}</summary>${inputs}</details>`;
    })}
    ${content && html`<div>
      ${takesText && html`<label class="field"><span class="label">Body${jsonSchema ? html` <span class="muted">${content["application/yaml"] ? "YAML or JSON" : "JSON"}</span>` : ""}</span>
        <textarea class="code" rows=${text.split("\n").length > 3 ? 8 : 3} spellcheck=${false} value=${text} onInput=${(event) => setText(event.currentTarget.value)}></textarea></label>`}
      ${takesFile && html`<${FileField} file=${file} onFile=${setFile} />`}
      ${jsonSchema && html`<details class="more"><summary>What it holds</summary><${Schema} schema=${jsonSchema} root=${root} /></details>`}
    </div>`}
    <${Sending} call=${call} make=${make} label=${`Send ${method}`} isDangerous=${method === "DELETE"} />
    <${Answers} operation=${operation} root=${root} />
  </form>`;
}

function Parameter({ parameter, root, value, onValue }) {
  const schema = plain(parameter.schema || {}, root);
  const choices = schema.type === "boolean" ? ["true", "false"] : Array.isArray(schema.enum) ? schema.enum.map(String) : null;
  const change = (event) => onValue(event.currentTarget.value);
  const word = wordOf(parameter.schema || {}, root);
  return html`<label class="field">
    <span class="label">${parameter.name} <span class="muted">${[word === "text" || choices ? "" : word, parameter.required && parameter.in !== "path" ? "needed" : ""].filter(Boolean).join(", ")}</span></span>
    ${choices ? html`<select value=${value} onChange=${change}><option value=""></option>${choices.map((each) => html`<option value=${each}>${each}</option>`)}</select>`
      : html`<input value=${value} onInput=${change} inputmode=${schema.type === "integer" ? "numeric" : "text"} autocapitalize="off" spellcheck=${false} list=${parameter.name === "model_name" ? "model-names" : undefined} />`}
    ${parameter.description && html`<span class="muted hint">${sentence(parameter.description)}</span>`}
  </label>`;
}

function Answers({ operation, root }) {
  const answers = Object.entries(operation.responses || {});
  if (!answers.length) return null;
  return html`<details class="more"><summary>Answers: ${answers.map(([status]) => status).join(", ")}</summary>
    <dl class="answers">${answers.map(([status, each]) => {
      const found = resolve(each, root);
      const content = found.content && found.content["application/json"];
      return html`<dt><span class=${`pill ${status < "400" ? "good" : "bad"}`}>${status}</span></dt>
        <dd>${sentence(found.description)}${content && content.schema && Object.keys(content.schema).length ? html`<${Schema} schema=${content.schema} root=${root} />` : ""}</dd>`;
    })}</dl>
  </details>`;
}

function Schema({ schema, root, depth = 0 }) {
  let it = plain(schema, root);
  let prefix = "";
  while (it.type === "array" && it.items) {
    prefix += "list of ";
    it = plain(it.items, root);
  }
  if (!it.properties) return html`<p class="schema muted">${wordOf(schema, root)}</p>`;
  const required = new Set(it.required || []);
  return html`<div class="schema">${prefix && html`<p class="muted">${prefix}:</p>`}<ul>${Object.entries(it.properties).map(([name, each]) => {
    const inner = plain(each, root);
    const items = inner.type === "array" && inner.items ? plain(inner.items, root) : inner;
    return html`<li key=${name}><code>${name}</code> <span class="muted">${items.properties ? (inner.type === "array" ? "list of objects" : "object") : wordOf(each, root)}${required.has(name) ? "" : ", optional"}${inner.description ? html` · ${sentence(inner.description)}` : ""}</span>
      ${items.properties && depth < DEEPEST && html`<details class="more"><summary>members</summary><${Schema} schema=${items} root=${root} depth=${depth + 1} /></details>`}</li>`;
  })}</ul></div>`;
}
