// The panel where a key is entered, of the page at /docs and of the dashboard.

import { html, useEffect, useRef } from "./vendored/htm-preact.module.js";
import { hasKey, setKey } from "./calls.js";

export function Key({ isWanted, onDone }) {
  const input = useRef(null);
  useEffect(() => input.current.focus(), []);
  const use = (event) => {
    event.preventDefault();
    setKey(input.current.value);
    onDone();
  };
  return html`<form id="key-panel" class="key" onSubmit=${use}>
    <label class="field"><span class="label">${isWanted ? "This server asks for a key, or for another one" : "Key"}</span>
      <input ref=${input} type="password" autocomplete="off" spellcheck=${false} aria-describedby="key-hint" /></label>
    <button type="submit" class="primary">Use it</button>
    <p class="muted" id="key-hint">It is sent as <code>Authorization: Bearer</code> and kept in this page until you leave it. The server's
      operator finds keys in <code>key_file.json</code>. ${hasKey() && "Leave the field empty to forget the key."}</p>
  </form>`;
}
