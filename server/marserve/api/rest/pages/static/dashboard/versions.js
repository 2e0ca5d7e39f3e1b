// How requests that name no version are shared out: sliders whose sum stays 100, and a question before they hold.

import { html, useEffect, useState } from "../vendored/htm-preact.module.js";
import { ask, segment } from "../calls.js";
import { Confirm } from "./confirm.js";
import { percentsOf, withPercent } from "./samples.js";

export function Weights({ name, versions, traffic, rollout, onKeyWanted, onChanged }) {
  const now = percentsOf(Object.fromEntries(versions.map((each) => [each, traffic.weights[each] || 0])));
  const [draft, setDraft] = useState(null); // null: as it is
  const [question, setQuestion] = useState(null);
  // A version came or went since: what was drawn up is about others.
  const isCurrent = draft && Object.keys(draft).join("\n") === versions.join("\n");
  const shown = isCurrent ? draft : now;
  const changed = versions.filter((each) => shown[each] !== now[each]);
  const path = `models/${segment(name)}/traffic`;
  const put = (extra) => ask(`${path}${extra}`, {
    method: "PUT",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ weights: shown, ...(traffic.sticky ? { sticky: traffic.sticky } : {}) }),
  });
  const isRolling = rollout && ["preparing", "running", "paused"].includes(rollout.state);
  const warning = isRolling ? ["The roll-out that is under way ends with this: what is set by hand stays."] : [];
  const end = (isDone) => { setQuestion(null); if (!isDone || question === "reset") setDraft(null); if (isDone) onChanged(); };
  // What was applied is shown until the server says it, too.
  useEffect(() => { if (draft && !changed.length) setDraft(null); }, [draft, changed.length]);

  if (versions.length < 2 && traffic.isDefault) return html`<p class="muted">There is one version, and it answers everything.</p>`;
  return html`
    <p class="muted note">${traffic.isDefault ? "No weights are set: the default version answers requests that name none." : "Of requests that name no version each gets this share."}${traffic.sticky ? " Requests that are alike in a header or cookie stay with one version." : ""}</p>
    ${versions.map((each) => html`<div class="weight" key=${each}>
      <label class="name" for=${`weight-${each}`}>${each}</label>
      <input type="range" id=${`weight-${each}`} min="0" max="100" step="1" value=${shown[each]} disabled=${versions.length < 2} aria-valuetext=${`${shown[each]} percent`} onInput=${(event) => setDraft(withPercent(shown, each, Number(event.currentTarget.value)))} />
      <output for=${`weight-${each}`}>${shown[each]} %</output>
      <span class="muted">${shown[each] !== now[each] ? `now ${now[each]} %` : (traffic.pending || []).includes(each) ? "not ready" : ""}</span>
    </div>`)}
    <div class="buttons">${/* not `disabled`: that would lose the focus that comes back from the question */ ""}
      <button type="button" class="primary" aria-disabled=${!changed.length} onClick=${() => changed.length && setQuestion("put")}>Apply…</button>
      <button type="button" disabled=${!changed.length} onClick=${() => setDraft(null)}>Back</button>
      ${!traffic.isDefault && html`<button type="button" class="quiet end" onClick=${() => setQuestion("reset")}>Without weights…</button>`}
    </div>
    ${question === "put" && html`<${Confirm} title=${`Share out requests of ${name}`} label="Apply" onKeyWanted=${onKeyWanted} onEnd=${end}
      changes=${[...changed.map((each) => `version ${each}: ${now[each]} % → ${shown[each]} %`), ...warning]}
      foresee=${async () => { const { pending } = await put("?dry_run=true"); return pending ? [`Not ready, so the others have their share until then: ${pending.join(", ")}.`] : ["It holds from the next request on."]; }}
      carryOut=${() => put("")} />`}
    ${question === "reset" && html`<${Confirm} title=${`Take the weights from ${name}`} label="Take them away" onKeyWanted=${onKeyWanted} onEnd=${end}
      changes=${["The default version answers every request that names none.", ...warning]} carryOut=${() => ask(path, { method: "DELETE" })} />`}`;
}
