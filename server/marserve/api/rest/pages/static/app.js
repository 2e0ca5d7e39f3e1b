// The page: what answers here, its models, its routes, and the key. It reads everything from the server that sent it.

import { html, render, useCallback, useEffect, useMemo, useState } from "./vendored/htm-preact.module.js";
import { ask, hasKey, urlOf } from "./calls.js";
import { Key } from "./key.js";
import { Model } from "./model.js";
import { Routes } from "./routes.js";

const MOST_PAGES = 10;
const LOOK_AGAIN_MS = 3000;

function App() {
  const [card, setCard] = useState(null);
  const [description, setDescription] = useState(null);
  const [models, setModels] = useState(null); // null: not read yet
  const [problem, setProblem] = useState("");
  const [isKeyWanted, setKeyWanted] = useState(false);
  const [keyRound, setKeyRound] = useState(0); // counts keys that were entered, so that what needs one is read again
  const [isKeyShown, setKeyShown] = useState(false);
  const wantKey = useCallback(() => { setKeyWanted(true); setKeyShown(true); }, []);

  const read = useCallback(async () => {
    try {
      const [found, described] = await Promise.all([ask(""), ask("openapi.json")]);
      setProblem("");
      setCard(found);
      setDescription(described);
      document.title = `${apiOf(found)} · marserve`;
    } catch (error) {
      setProblem(`The server does not answer (${error.message}).`);
    }
  }, []);
  useEffect(() => { read(); }, []);

  const hasModels = !!description && !!description.paths["/docs/models"];
  const readModels = useCallback(async () => {
    try {
      const found = [];
      let token = "";
      for (let page = 0; page < MOST_PAGES; page++) {
        const { models: some, workflows, nextPageToken } = await ask(`docs/models${token ? `?next_page_token=${token}` : ""}`);
        found.push(...some, ...workflows.map((name) => ({ name, state: "" })));
        if (!(token = nextPageToken)) break;
      }
      setKeyWanted(false);
      setModels(found);
    } catch (error) {
      if (error.wantsKey) wantKey();
      else setProblem(error.message);
    }
  }, []);
  useEffect(() => { if (hasModels) readModels(); }, [hasModels, keyRound]);
  useEffect(() => {
    if (!models || !models.some((each) => each.state === "loading")) return;
    const timer = setTimeout(() => { if (!document.hidden) readModels(); else setModels([...models]); }, LOOK_AGAIN_MS);
    return () => clearTimeout(timer);
  }, [models]);

  return html`
    <a class="skip" href="#main">To the content</a>
    <${Top} card=${card} isKeyShown=${isKeyShown} onKey=${() => setKeyShown(!isKeyShown)} />
    ${isKeyShown && html`<${Key} isWanted=${isKeyWanted} onDone=${() => { setKeyRound(keyRound + 1); setKeyWanted(false); setKeyShown(false); }} />`}
    <main id="main" tabindex="-1">
      ${problem && html`<p class="problem banner" role="alert">${problem} <button type="button" onClick=${() => { read(); if (hasModels) readModels(); }}>Try again</button></p>`}
      ${hasModels && html`<${Models} models=${models} isKeyWanted=${isKeyWanted} onKeyWanted=${wantKey} keyRound=${keyRound} />`}
      ${description ? html`<${Routes} description=${description} models=${models || []} onKeyWanted=${wantKey} />`
        : !problem && html`<p class="muted">Reading the API description…</p>`}
    </main>
    <footer><a href=${urlOf("openapi.json")}>openapi.json</a>${card && card.links.metrics && html` <a href=${urlOf("metrics")}>metrics</a>`}</footer>`;
}

function apiOf(card) {
  const names = [["predictions", "Inference"], ["models", "Management"], ["metrics", "Metrics"]];
  return names.filter(([link]) => link in card.links).map(([, name]) => name).join(" and ") || "Server";
}

function Top({ card, isKeyShown, onKey }) {
  return html`<header>
    <img src=${urlOf("docs/icon.svg")} alt="" width="28" height="28" />
    <h1>marserve</h1>
    ${card && html`<span class="muted version">${card.version}</span><span class="api">${apiOf(card)}</span>
      <span class="state good">${card.status}</span>`}
    <button type="button" class="end" aria-expanded=${isKeyShown} aria-controls="key-panel" onClick=${onKey}>${hasKey() ? "Key ✓" : "Key"}</button>
  </header>`;
}

// `/docs#digits` opens that model.
function nameInAddress() {
  try { return decodeURIComponent(location.hash.slice(1)); } catch { return ""; }
}

function Models({ models, isKeyWanted, onKeyWanted, keyRound }) {
  const [sought, setSought] = useState("");
  const wanted = useMemo(nameInAddress, []);
  const found = (models || []).filter((each) => each.name.toLowerCase().includes(sought.toLowerCase()));
  return html`<section aria-labelledby="models">
    <div class="head"><h2 id="models">Models</h2>
      ${models && models.length > 8 && html`<input type="search" class="filter" aria-label="Find a model" placeholder=${`Find one of ${models.length}`} value=${sought} onInput=${(event) => setSought(event.currentTarget.value)} />`}
    </div>
    ${!models && (isKeyWanted ? html`<p class="muted">The models are shown once a key is entered.</p>` : html`<p class="muted">Reading the models…</p>`)}
    ${models && !models.length && html`<p class="muted empty">No model is registered yet. <code>marserve register ARCHIVE</code> adds one to a running server.</p>`}
    ${found.map((each, index) => html`<${Model} key=${each.name} model=${each} keyRound=${keyRound} onKeyWanted=${onKeyWanted}
      isWanted=${wanted === each.name} isOpen=${wanted ? wanted === each.name : index === 0 && !sought} />`)}
  </section>`;
}

render(html`<${App} />`, document.getElementById("app"));
