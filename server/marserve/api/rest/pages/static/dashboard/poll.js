// Reads something of the server again and again, with one request at a time, while the page is seen.

import { html, useEffect, useRef, useState } from "../vendored/htm-preact.module.js";

const MOST_WAIT_MS = 30_000;
const MOST_ANSWER_MS = 20_000;

// `read(signal)` is called every `everyMs` after its last answer.
// Gives `{ data, problem, isOld, again }`: the newest data, what was wrong since, whether the data are older than that.
// After errors it waits longer each time. A change of `keys` has it read anew at once.
export function usePoll(read, { everyMs, keys = [], onKeyWanted, keyRound = 0 }) {
  const [seen, setSeen] = useState({ data: null, problem: "", isGone: false });
  const now = useRef(null);
  useEffect(() => {
    let isOver = false;
    let asking = null;
    let timer = 0;
    let failures = 0;
    let isWanted = false;
    const look = async () => {
      clearTimeout(timer);
      if (isOver) return;
      if (asking || document.hidden) { isWanted = !!asking; return; }
      const stop = asking = new AbortController();
      const late = setTimeout(() => stop.abort(new DOMException("late", "TimeoutError")), MOST_ANSWER_MS);
      isWanted = false;
      let waitMs = everyMs;
      try {
        const data = await read(stop.signal);
        failures = 0;
        if (!isOver) setSeen({ data, problem: "", isGone: false });
      } catch (error) {
        if (isOver) return;
        failures += 1;
        waitMs = Math.min(MOST_WAIT_MS, everyMs * 2 ** Math.min(failures, 4));
        if (error.wantsKey && onKeyWanted) onKeyWanted();
        const problem = sentenceOf(error);
        setSeen((before) => ({ data: before.data, problem, isGone: error.status === 404, wantsKey: !!error.wantsKey, waitMs }));
        if (error.wantsKey) return; // another key begins anew
      } finally {
        clearTimeout(late);
        asking = null;
      }
      if (isWanted) look();
      else timer = setTimeout(look, waitMs);
    };
    now.current = look;
    const seenAgain = () => { if (!document.hidden) look(); };
    document.addEventListener("visibilitychange", seenAgain);
    look();
    return () => {
      isOver = true;
      if (asking) asking.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seenAgain);
    };
  }, [everyMs, keyRound, ...keys]);
  return { ...seen, isOld: !!seen.problem && seen.data !== null, again: () => now.current && now.current() };
}

export function sentenceOf(error) {
  if (error.status) return error.message;
  if (error.name === "TimeoutError") return `The server has not answered for ${MOST_ANSWER_MS / 1000} seconds.`;
  return `The server does not answer (${error.message}).`;
}

// What is wrong with what a page reads, and that it is tried again.
export function Trouble({ poll }) {
  if (!poll.problem) return null;
  if (poll.wantsKey) return html`<p class="muted">${poll.isOld ? "These are old figures: newer ones need a key." : "What the server does is shown once a key is entered."}</p>`;
  const seconds = Math.round((poll.waitMs || 0) / 1000);
  return html`<p class="problem banner" role="alert"><span>${poll.problem} ${poll.isOld ? "These are old figures. " : ""}It is asked again ${seconds > 1 ? `in ${seconds} s` : "soon"}.</span>
    <button type="button" onClick=${poll.again}>Now</button></p>`;
}
