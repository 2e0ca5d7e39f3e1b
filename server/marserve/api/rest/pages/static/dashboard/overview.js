import { html } from "../vendored/htm-preact.module.js";

export function Overview({ route, onKeyWanted, keyRound }) {
  return html`<h2 id="page-heading" tabindex="-1">Overview</h2>`;
}
