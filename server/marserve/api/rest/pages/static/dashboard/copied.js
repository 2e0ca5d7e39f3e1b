// Text that is shown to be copied, with a button that does. Plain http from elsewhere has no clipboard.

import { html, useState } from "../vendored/htm-preact.module.js";

const SHOWN_MS = 2000;

export function Copied({ text, what }) {
  const [said, setSaid] = useState("");
  const copy = async () => {
    try { await navigator.clipboard.writeText(text); } catch { return; } // not allowed: the text can be selected
    setSaid("Copied");
    setTimeout(() => setSaid(""), SHOWN_MS);
  };
  return html`<div class="copied">${what && html`<p class="muted">${what}:</p>`}
    <div class="line"><pre tabindex="0">${text}</pre>${navigator.clipboard && html`<button type="button" class="quiet" onClick=${copy}>${said || "Copy"}</button>`}</div>
    <span class="hidden" role="status">${said}</span></div>`;
}
