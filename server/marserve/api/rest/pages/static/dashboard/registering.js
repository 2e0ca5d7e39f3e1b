// One registration from the file, or the address, to a model that is ready: its steps, and its end. No markup.

import { ask, segment } from "../calls.js";
import { bytes, counted } from "./figures.js";
import { sentenceOf } from "./poll.js";
import { orderRegistration, sendArchive } from "./sending.js";

const LOOK_MS = 700;
const MOST_VERSIONS = 1000; // that the server lists at once
const LOG_LINES = 100;

const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });
const labelOf = (version) => JSON.stringify([version.modelName, version.modelVersion]);
export const isAddress = (text) => /^[a-z][a-z0-9+.-]*:\/\//i.test(text);

// Archives that were sent from here, and that no version has come from: another try may replace them.
const unused = new Set();

export class Registration {
  // `order` is `{ file, storedAs, address, replaces, parameters }`; `onChange()` is called when there is news.
  constructor(order, onChange) {
    this.order = order;
    this.onChange = onChange;
    this.state = "running"; // or "done", "failed", "cancelled"
    this.steps = [...(order.file ? ["Upload"] : isAddress(order.address) ? ["Download"] : []), "Load"].map((name) => ({ name, state: "waiting", text: "", part: null }));
    this.message = "";
    this.error = null;
    this.lines = [];
    this.notes = [];
    this.registered = null;
    this.isCancelling = false;
    this.canCancel = true;
    this.stop = new AbortController();
    this.ends = new Set(); // what was already asked to end
  }

  step(name, news) {
    const found = this.steps.find((each) => each.name === name);
    if (found) Object.assign(found, news);
    this.onChange();
  }

  async run() {
    try {
      const url = this.order.file ? await this.upload() : this.order.address;
      if (this.isCancelling) return this.end("cancelled");
      await this.register(url);
    } catch (error) {
      if (this.isCancelling) return this.end("cancelled");
      this.error = error;
      this.message = error.status || error.name !== "TypeError" ? error.message : sentenceOf(error);
      if (error.requestId && this.isOrdered) await this.readLines(error.requestId);
      this.end("failed");
    }
  }

  end(state) {
    for (const step of this.steps) if (step.state === "now") step.state = state;
    const { file, storedAs } = this.order;
    if (file && this.isSent && state !== "done") this.notes.push(`The archive ${storedAs} is in the model store, and no model was registered from it. Another file that you send as ${storedAs} replaces it.`);
    else if (file && state !== "done") this.notes.push("Nothing of the file was kept.");
    if (this.isOrdered && state === "failed") this.notes.push("Nothing is registered.");
    this.state = state;
    this.onChange();
  }

  async upload() {
    const { file, storedAs, replaces } = this.order;
    const began = performance.now();
    const onProgress = (sent) => {
      if (sent === "reading") return this.step("Upload", { state: "now", text: "reading the file" });
      const seconds = (performance.now() - began) / 1000;
      const rate = seconds > 1 && sent ? `, ${bytes(Math.round(sent / seconds))}/s` : "";
      return this.step("Upload", sent >= file.size ? { text: `${bytes(file.size)}, checked by the server`, part: null } : { text: `${bytes(sent)} of ${bytes(file.size)}${rate}`, part: sent / file.size });
    };
    const taken = await sendArchive(file, storedAs, { replaces: replaces || unused.has(storedAs), signal: this.stop.signal, onProgress });
    this.isSent = true;
    if (taken.isNew) unused.add(storedAs);
    this.step("Upload", { state: "done", part: 1, text: `${taken.isNew ? bytes(taken.bytes) : "the store had the same file"}, SHA-256 ${taken.sha256.slice(0, 16)}…${taken.isCompared ? ", compared with yours" : ""}` });
    return taken.archive;
  }

  async register(url) {
    const { parameters } = this.order;
    this.step(this.steps[0].name === "Download" ? "Download" : "Load", { state: "now", text: "" });
    this.before = await this.look();
    if (this.isCancelling) return this.end("cancelled");
    const registering = orderRegistration({ url, ...parameters });
    this.isOrdered = true;
    let isOver = false;
    registering.catch(() => {}).finally(() => { isOver = true; });
    const watching = (async () => {
      while (!isOver) {
        await pause(LOOK_MS);
        if (!isOver) await this.watch(url).catch(() => {}); // the registration itself says what is wrong
      }
    })();
    let registered;
    try { registered = await registering; } finally { isOver = true; await watching; }
    if (this.isCancelling) {
      await this.unregister(registered);
      return this.end("cancelled");
    }
    unused.delete(this.order.storedAs);
    this.registered = registered;
    this.message = registered.status;
    for (const step of this.steps) Object.assign(step, { state: "done", part: 1 });
    return this.end("done");
  }

  // The versions and the downloads that there are now.
  async look() {
    const { parameters, address } = this.order;
    const named = parameters.model_name ? `&search=${segment(parameters.model_name)}` : "";
    const [stats, downloads] = await Promise.all([ask(`stats?sort=name&limit=${MOST_VERSIONS}${named}`), address ? ask("downloads").then((found) => found.downloads, () => []) : []]);
    return { versions: stats.versions, downloads, isWhole: stats.versionsFound <= MOST_VERSIONS };
  }

  // What has become of it by now.
  async watch(url) {
    const now = await this.look();
    const plain = url.split(/[?#]/)[0];
    const earlier = new Set(this.before.downloads.map((each) => each.id));
    const download = now.downloads.find((each) => !earlier.has(each.id) && each.url.split("?")[0] === plain && ["waiting", "downloading"].includes(each.state));
    if (download) {
      const size = download.size;
      this.step("Download", download.state === "waiting" ? { text: "waiting for its origin" } : { text: `${bytes(download.bytes)}${size ? ` of ${bytes(size)}` : ""}`, part: size ? download.bytes / size : null });
      if (this.isCancelling) await this.endOnce(`downloads/${download.id}`);
    }
    const known = new Set(this.before.versions.map(labelOf));
    const version = this.before.isWhole && now.versions.find((each) => !known.has(labelOf(each)) && (!this.order.parameters.model_name || each.modelName === this.order.parameters.model_name));
    if (!version) return;
    this.step("Download", { state: "done", part: 1, text: "" });
    const { workers } = version;
    const waits = [...new Set(workers.map((each) => each.why).filter(Boolean))];
    const wanted = Math.max(version.minWorkers, workers.length);
    this.step("Load", { state: "now", text: [`version ${version.modelVersion} of ${version.modelName}: ${version.readyWorkers} of ${counted(wanted, "worker")} ready`, ...waits].join("; "), part: wanted ? version.readyWorkers / wanted : null });
    if (this.isCancelling) await this.endOnce(`models/${segment(version.modelName)}/${segment(version.modelVersion)}`);
  }

  // Ends what is under way: at once, or as soon as the server has something that can be ended.
  cancel() {
    if (this.state !== "running" || this.isCancelling) return;
    this.isCancelling = true;
    this.stop.abort();
    this.onChange();
  }

  async unregister({ modelName, modelVersion }) {
    await this.endOnce(`models/${segment(modelName)}/${segment(modelVersion)}`);
  }

  async endOnce(path) {
    if (this.ends.has(path)) return;
    this.ends.add(path);
    try { await ask(path, { method: "DELETE" }); } catch (error) {
      if (error.status !== 404) this.notes.push(`It could not be undone: ${sentenceOf(error)}`);
    }
  }

  async readLines(requestId) {
    this.requestId = requestId;
    try { this.lines = (await ask(`logs?request=${segment(requestId)}&log=server,model&tail=${LOG_LINES}`)).lines; } catch { this.lines = []; }
  }
}
