// A model's newest log lines, followed while the page is seen.

import { html, useEffect, useRef, useState } from "../vendored/htm-preact.module.js";
import { isKeyWanted, segment, urlOf, withKey } from "../calls.js";

const KEPT = 300; // lines
const LONGEST = 4000; // characters of a line
const AGAIN_MS = 5000;

export function Logs({ name, onKeyWanted, keyRound }) {
  const [lines, setLines] = useState([]);
  const [isPaused, setPaused] = useState(false);
  const [problem, setProblem] = useState("");
  const [level, setLevel] = useState("");
  const [withAccess, setWithAccess] = useState(false); // this page's own requests are in that log
  const box = useRef(null);
  const isAtEnd = useRef(true);
  const lastTop = useRef(0);

  useEffect(() => {
    if (isPaused) return undefined;
    let stop = new AbortController();
    let timer = 0;
    let isOver = false;
    const follow = async () => {
      clearTimeout(timer);
      if (isOver || document.hidden) return;
      stop = new AbortController();
      const { signal } = stop;
      let begun = false;
      let rest = 0; // numbers lines, so that each keeps its element
      const take = (found) => {
        const numbered = found.map((line) => ({ ...line, number: `${Date.now()}-${rest++}` }));
        setLines((before) => (begun ? [...before, ...numbered] : numbered).slice(-KEPT));
        begun = true;
      };
      try {
        await readEvents(`logs?model=${segment(name)}&tail=100&follow=true${withAccess ? "" : "&log=server,model"}${level ? `&level=${level}` : ""}`, signal, () => setProblem(""), take);
        if (!signal.aborted) setProblem("The server ended the stream of lines.");
      } catch (error) {
        if (signal.aborted) return;
        setProblem(error.status ? error.message : `The server does not answer (${error.message}).`);
        if (error.wantsKey) { onKeyWanted(); return; }
      }
      if (!signal.aborted && !isOver) timer = setTimeout(follow, AGAIN_MS);
    };
    const seen = () => { if (document.hidden) stop.abort(); else follow(); };
    document.addEventListener("visibilitychange", seen);
    follow();
    return () => {
      isOver = true;
      stop.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [name, isPaused, level, withAccess, keyRound]);
  useEffect(() => { if (isAtEnd.current && box.current) box.current.scrollTop = box.current.scrollHeight; }, [lines]);
  // Only a reader goes up; lines that have come since make no difference.
  const scrolled = ({ currentTarget: place }) => {
    const isEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 30;
    isAtEnd.current = isEnd || (isAtEnd.current && place.scrollTop >= lastTop.current);
    lastTop.current = place.scrollTop;
  };

  return html`
    <div class="head"><h3 id="logs">Log</h3>
      <label class="end tick"><input type="checkbox" checked=${withAccess} onChange=${(event) => setWithAccess(event.currentTarget.checked)} /> access log</label>
      <label><span class="hidden">Least level</span><select value=${level} onChange=${(event) => setLevel(event.currentTarget.value)}>
        <option value="">All levels</option><option value="info">info</option><option value="warn">warn</option><option value="error">error</option></select></label>
      <button type="button" aria-pressed=${isPaused} onClick=${() => setPaused(!isPaused)}>${isPaused ? "Go on" : "Pause"}</button></div>
    ${problem && html`<p class="problem note" role="alert">${problem} It is asked again soon.</p>`}
    <div class="lines" ref=${box} role="log" aria-live="off" aria-labelledby="logs" tabindex="0" onScroll=${scrolled}>
      ${lines.length ? lines.map((each) => html`<p key=${each.number} class=${`level-${LEVELS.includes(each.level) ? each.level : "other"}`}>${each.text.slice(0, LONGEST)}</p>`) : html`<p class="muted">No line yet.</p>`}</div>`;
}

const LEVELS = ["debug", "info", "warn", "error"];

// Server-Sent Events of `LogLine`s by `fetch`, which can send a key. Returns at an event `end`.
async function readEvents(path, signal, onBegin, onLines) {
  const answer = await fetch(urlOf(path), { headers: { accept: "text/event-stream", ...withKey() }, credentials: "omit", cache: "no-store", signal });
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    const error = new Error((body && body.message) || `The answer was ${answer.status}.`);
    throw Object.assign(error, { status: answer.status, wantsKey: isKeyWanted(answer.status, body) });
  }
  onBegin();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    const lines = [];
    for (const each of events) {
      const data = each.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
      if (each.startsWith("event: end")) return;
      if (each.startsWith("event: error")) throw Object.assign(new Error(JSON.parse(data).message), { status: 200 });
      if (data) lines.push(JSON.parse(data));
    }
    if (lines.length) onLines(lines);
  }
}
