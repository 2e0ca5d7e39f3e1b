import { html } from "../vendored/htm-preact.module.js";

export function Requests({ route, onKeyWanted, keyRound }) {
  return html`<h2 id="page-heading" tabindex="-1">Requests</h2>`;
}

export function OneRequest({ route, onKeyWanted, keyRound }) {
  return html`<h2 id="page-heading" tabindex="-1">Request ${route.id}</h2>`;
}
