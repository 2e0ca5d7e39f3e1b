// Asks before something is changed: what it will do, in the server's own words where it can be tried, and then does it.

import { html, useEffect, useRef, useState } from "../vendored/htm-preact.module.js";
import { sentenceOf } from "./poll.js";

// `foresee()` gives sentences, from a dry run; `carryOut()` makes the change. `onEnd(isDone)` is called once it is closed.
export function Confirm({ title, changes, label, foresee, carryOut, onKeyWanted, onEnd }) {
  const dialog = useRef(null);
  const isDone = useRef(false);
  const [foreseen, setForeseen] = useState(null);
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const fail = (error) => {
    setProblem(sentenceOf(error));
    if (error.wantsKey) { dialog.current.close(); onKeyWanted(); }
  };
  useEffect(() => {
    dialog.current.showModal();
    let isHere = true;
    if (foresee) foresee().then((words) => isHere && setForeseen(words), (error) => isHere && fail(error));
    return () => { isHere = false; };
  }, []);
  const go = async () => {
    setBusy(true);
    setProblem("");
    try {
      await carryOut();
      isDone.current = true;
      dialog.current.close(); // which gives the focus back
    } catch (error) {
      setBusy(false);
      fail(error);
    }
  };
  const waits = !!foresee && foreseen === null;
  return html`<dialog ref=${dialog} aria-labelledby="confirm-title" onClose=${() => onEnd(isDone.current)} onCancel=${(event) => { if (isBusy) event.preventDefault(); }}>
    <h3 id="confirm-title">${title}</h3>
    <ul class="changes">${changes.map((each) => html`<li key=${each}>${each}</li>`)}</ul>
    <div aria-live="polite">${waits && !problem && html`<p class="muted">Asking the server what this would do…</p>`}
      ${(foreseen || []).map((each) => html`<p key=${each} class="muted">${each}</p>`)}</div>
    ${problem && html`<p class="problem" role="alert">${problem} Nothing was changed.</p>`}
    <div class="buttons"><button type="button" class="primary" disabled=${isBusy || waits} onClick=${go}>${isBusy ? "…" : label}</button>
      <button type="button" disabled=${isBusy} onClick=${() => dialog.current.close()}>Cancel</button></div>
  </dialog>`;
}
