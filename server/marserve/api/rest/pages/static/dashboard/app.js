// The dashboard's frame: navigation, the key, and the page that the address names. All else is the pages' own.

import { html, render, useCallback, useEffect, useRef, useState } from "../vendored/htm-preact.module.js";
import { ask, hasKey, urlOf } from "../calls.js";
import { Key } from "../key.js";
import { Overview } from "./overview.js";
import { PAGES, routeOf, titleOf } from "./routes.js";

// Read when they are first gone to. Each exports a component that gets `{ route, onKeyWanted, keyRound }` and whose
// heading is `<h2 id="page-heading" tabindex="-1">`.
const LATER = {
  model: async () => (await import("./model.js")).Model,
  profile: async () => (await import("./profile.js")).Profile,
  optimise: async () => (await import("./optimise.js")).Optimise,
  requests: async () => (await import("./requests.js")).Requests,
  request: async () => (await import("./requests.js")).OneRequest,
  register: async () => (await import("./register.js")).Register,
};

function App() {
  const [route, setRoute] = useState(() => routeOf(location.hash));
  const [card, setCard] = useState(null);
  const [isKeyWanted, setKeyWanted] = useState(false);
  const [isKeyShown, setKeyShown] = useState(false);
  const [keyRound, setKeyRound] = useState(0); // counts keys that were entered, so that what needs one is read again
  const onKeyWanted = useCallback(() => { setKeyWanted(true); setKeyShown(true); }, []);
  const hasMoved = useRef(false);

  useEffect(() => {
    const go = () => { hasMoved.current = true; setRoute(routeOf(location.hash)); };
    addEventListener("hashchange", go);
    ask("").then(setCard, () => {}); // the pages say what is wrong with the server
    return () => removeEventListener("hashchange", go);
  }, []);
  const place = JSON.stringify([route.page, route.name, route.id]);
  useEffect(() => { document.title = `${titleOf(route).slice(0, 100)} · marserve`; }, [place]);
  const onShown = useCallback(() => {
    const heading = document.getElementById("page-heading");
    if (hasMoved.current && heading) { scrollTo(0, 0); heading.focus({ preventScroll: true }); }
  }, []);

  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>To the content</a>
    <header>
      <img src=${urlOf("docs/icon.svg")} alt="" width="28" height="28" />
      <h1>marserve</h1>
      ${card && html`<span class="muted version">${card.version}</span>`}
      <nav aria-label="Dashboard">${PAGES.map(([page, hash, name]) => html`<a key=${page} href=${hash} aria-current=${isIn(route, page) ? "page" : undefined}>${name}</a>`)}</nav>
      <button type="button" class="end" aria-expanded=${isKeyShown} aria-controls="key-panel" onClick=${() => setKeyShown(!isKeyShown)}>${hasKey() ? "Key ✓" : "Key"}</button>
    </header>
    ${isKeyShown && html`<${Key} isWanted=${isKeyWanted} onDone=${() => { setKeyRound(keyRound + 1); setKeyWanted(false); setKeyShown(false); }} />`}
    <main id="main" tabindex="-1"><${Page} key=${place} place=${place} route=${route} onKeyWanted=${onKeyWanted} keyRound=${keyRound} onShown=${onShown} /></main>
    <footer><a href=${urlOf("docs")}>API</a><a href=${urlOf("openapi.json")}>openapi.json</a>${card && card.links.metrics && html`<a href=${urlOf("metrics")}>metrics</a>`}</footer>`;
}

// Under which entry of the navigation a page is.
const isIn = (route, page) => page === { model: "overview", profile: "overview", optimise: "overview", request: "requests" }[route.page] || page === route.page;

function Page({ place, route, onKeyWanted, keyRound, onShown }) {
  const load = LATER[route.page];
  const [shown, setShown] = useState({ component: load ? null : route.page === "overview" ? Overview : Unknown, problem: "" });
  useEffect(() => {
    if (!load) return onShown();
    let isHere = true;
    load().then(
      (component) => { if (isHere) { setShown({ component, problem: "" }); setTimeout(onShown); } },
      (error) => { if (isHere) setShown({ component: null, problem: error.message }); },
    );
    return () => { isHere = false; };
  }, []);
  if (shown.problem) return html`<p class="problem banner" role="alert">This page could not be read from the server (${shown.problem}). <button type="button" onClick=${() => location.reload()}>Try again</button></p>`;
  return shown.component ? html`<${shown.component} route=${route} onKeyWanted=${onKeyWanted} keyRound=${keyRound} />` : html`<p class="muted">Reading…</p>`;
}

function Unknown() {
  return html`<h2 id="page-heading" tabindex="-1">Not found</h2><p>There is no such page here. <a href="#/">Overview</a></p>`;
}

render(html`<${App} />`, document.getElementById("app"));
