import { html } from "../vendored/htm-preact.module.js";

export function Register({ route, onKeyWanted, keyRound }) {
  return html`<h2 id="page-heading" tabindex="-1">Register</h2>`;
}
