// A call that a form makes: the button that sends it, the line for a shell, and the answer below.

import { html, useEffect, useRef, useState } from "./vendored/htm-preact.module.js";
import { Answer } from "./answer.js";
import { curlOf, isKeyWanted, send } from "./calls.js";

// One call at a time. `start` sends a request and cancels the one before.
export function useCall(onKeyWanted) {
  const [call, setCall] = useState({ isBusy: false, answer: null, problem: "" });
  const running = useRef(null);
  const cancel = () => running.current && running.current.abort();
  useEffect(() => cancel, []);

  async function start(request) {
    cancel();
    const control = (running.current = new AbortController());
    let seen = null;
    let isDrawn = false;
    const draw = (extra = {}) => running.current === control && setCall({ isBusy: true, answer: seen, problem: "", ...extra });
    draw();
    try {
      await send(request, control.signal, (progress) => {
        seen = progress;
        if (isDrawn) return; // a stream may have thousands of pieces: one drawing a frame
        isDrawn = true;
        requestAnimationFrame(() => { isDrawn = false; if (!control.signal.aborted && !seen.isWhole) draw(); });
      });
      draw({ isBusy: false });
      if (wantsKey(seen)) onKeyWanted();
    } catch (error) {
      const isOurs = control.signal.aborted;
      draw({ isBusy: false, problem: isOurs ? "Cancelled." : `No answer came: the server does not answer, or closed the connection (${error.message}).` });
    }
  }
  return { ...call, start, cancel };
}

function wantsKey(answer) {
  if (answer.status < 400) return false;
  try {
    return isKeyWanted(answer.status, JSON.parse(new TextDecoder().decode(answer.pieces[0] || new Uint8Array())));
  } catch {
    return answer.status === 401;
  }
}

// `make` gives `{ request, shown }`, or throws an error whose message says what is wrong with the form.
export function Sending({ call, make, label, isDangerous }) {
  const [problem, setProblem] = useState("");
  const start = () => {
    try {
      const { request } = make();
      setProblem("");
      call.start(request);
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<div class="sending">
    <div class="buttons">
      <button type="submit" class=${isDangerous ? "danger" : "primary"} onClick=${(event) => { event.preventDefault(); start(); }}
        aria-busy=${call.isBusy} title="Ctrl+Enter">${label}</button>
      ${call.isBusy && html`<button type="button" onClick=${call.cancel}>Cancel</button>`}
    </div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <${Line} make=${make} />
    <${Answer} ...${call} />
  </div>`;
}

function Line({ make }) {
  const [isCopied, setCopied] = useState(false);
  let line;
  try {
    const { request, shown } = make();
    line = curlOf(request, shown);
  } catch {
    return null;
  }
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(line);
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    } catch { /* no clipboard on plain http elsewhere: the line can be selected */ }
  };
  return html`<div class="line">
    <pre role="group" tabindex="0" aria-label="The same as a command">${line}</pre>
    ${navigator.clipboard && html`<button type="button" class="quiet" onClick=${copy}>${isCopied ? "Copied" : "Copy"}</button>`}
  </div>`;
}
