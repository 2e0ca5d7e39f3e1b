import { html } from "../vendored/htm-preact.module.js";

export function Model({ route, onKeyWanted, keyRound }) {
  return html`<h2 id="page-heading" tabindex="-1">${route.name}</h2>`;
}
