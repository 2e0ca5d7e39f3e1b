// A version's workers: how many, what each does, why one is not up; and the question before there are more or fewer.

import { html, useEffect, useState } from "../vendored/htm-preact.module.js";
import { ask, segment } from "../calls.js";
import { Confirm } from "./confirm.js";
import { bytes, DASH } from "./figures.js";

const MOST_WORKERS = 1000;

export function Workers({ version, onKeyWanted, onChanged }) {
  const { workers, lastDeath } = version;
  return html`
    <${Scale} version=${version} onKeyWanted=${onKeyWanted} onChanged=${onChanged} />
    ${lastDeath && html`<${Died} death=${lastDeath} what="The last worker that ended" />`}
    ${workers.length > 0 ? html`<table class="figures stack"><caption class="hidden">Workers of version ${version.modelVersion}</caption>
      <thead><tr><th scope="col">Worker</th><th scope="col">State</th><th scope="col" class="number">Memory</th><th scope="col" class="wide">Device</th><th scope="col" class="number wide">Process</th><th scope="col" class="number">Restarts</th></tr></thead>
      <tbody>${workers.map((each) => html`<${Worker} key=${each.id} worker=${each} />`)}</tbody></table>` : html`<p class="muted">It has no worker now.</p>`}`;
}

const TONES = { READY: "good", LOADING: "fair", UNLOADING: "" };

function Worker({ worker }) {
  const devices = worker.gpuIds || (worker.gpuId === undefined ? [] : [worker.gpuId]);
  const health = worker.health && worker.health.state === "failing" ? `Its handler says that it is not well: ${worker.health.reason || "without a reason"}` : "";
  const waits = worker.status !== "READY" && worker.waitsFor ? `It waits for ${worker.waitsFor}.` : "";
  const notes = [waits, health, worker.nextStart && worker.status !== "READY" ? `Next start: ${worker.nextStart}` : ""].filter(Boolean);
  return html`<tr><th scope="row">${worker.id}${worker.node ? html` <span class="muted">on ${worker.node}</span>` : ""}</th>
      <td><span class=${`state ${TONES[worker.status] || ""}`}>${worker.status.toLowerCase()}</span></td>
      <td class="number">${bytes(worker.memoryUsage)}</td><td class="wide">${devices.length ? `GPU ${devices.join(", ")}` : "CPU"}</td>
      <td class="number wide">${worker.pid || DASH}</td><td class="number">${worker.restarts}</td></tr>
    ${(notes.length > 0 || worker.lastDeath) && html`<tr class="why"><td colspan="6">${notes.map((each) => html`<p key=${each}>${each}</p>`)}
      ${worker.lastDeath && html`<${Died} death=${worker.lastDeath} what="The one before it" />`}</td></tr>`}`;
}

function Died({ death, what }) {
  const lines = death.lastLines || [];
  return html`<div class="death"><p>${what}: <strong>${death.cause}</strong>, ${death.at}. ${death.detail}</p>
    ${(death.traceback || lines.length > 0) && html`<details class="more"><summary>${death.traceback ? "Its traceback" : "What it printed last"}</summary><pre class="traceback">${death.traceback || lines.join("\n")}</pre></details>`}</div>`;
}

function Scale({ version, onKeyWanted, onChanged }) {
  const { modelName, modelVersion, minWorkers, maxWorkers } = version;
  const [draft, setDraft] = useState(null); // `{ least, most }` as text
  const [isAsked, setAsked] = useState(false);
  const shown = draft || { least: String(minWorkers), most: String(maxWorkers) };
  const least = Number(shown.least), most = Number(shown.most);
  const isWhole = [shown.least, shown.most].every((each) => /^\d+$/.test(each.trim())) && most <= MOST_WORKERS;
  const problem = !isWhole ? `Numbers of workers are whole, from 0 to ${MOST_WORKERS}.` : least > most ? "The least is more than the most." : "";
  const isChanged = !problem && (least !== minWorkers || most !== maxWorkers);
  const change = (member) => (event) => setDraft({ ...shown, [member]: event.currentTarget.value });
  const put = (extra) => ask(`models/${segment(modelName)}/${segment(modelVersion)}?min_worker=${least}&max_worker=${most}${extra}`, { method: "PUT" });
  const end = (isDone) => { setAsked(false); if (isDone) onChanged(); else setDraft(null); };
  useEffect(() => { if (draft && least === minWorkers && most === maxWorkers) setDraft(null); }, [minWorkers, maxWorkers]);
  return html`<form class="scale" onSubmit=${(event) => { event.preventDefault(); if (isChanged) setAsked(true); }}>
    <label class="field"><span class="label">At least</span><input inputmode="numeric" value=${shown.least} onInput=${change("least")} /></label>
    <label class="field"><span class="label">At most</span><input inputmode="numeric" value=${shown.most} onInput=${change("most")} /></label>
    <button type="submit" aria-disabled=${!isChanged}>Scale…</button>
    ${draft && problem && html`<p class="problem" role="alert">${problem}</p>`}
    </form>
    ${isAsked && html`<${Confirm} title=${`Scale version ${modelVersion} of ${modelName}`} label="Scale" onKeyWanted=${onKeyWanted} onEnd=${end}
      changes=${[`at least: ${minWorkers} → ${least}`, `at most: ${maxWorkers} → ${most}`, ...(most === 0 ? ["Without a worker it answers no request."] : [])]}
      foresee=${async () => { const would = await put("&dry_run=true"); return [would.status, ...(would.notes || [])].filter(Boolean); }}
      carryOut=${() => put("")} />`}`;
}
