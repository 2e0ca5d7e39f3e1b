// A worker of marserve in JavaScript: speaks the wire of docs/worker-wire.md, and calls the archive's handler.mjs.
//
//   workerProgram: [node, worker.mjs]        # in model-config.yaml; handler.mjs exports load(folder, config), handle(rows)
import { readSync, writeSync } from "node:fs";
import { Socket } from "node:net";
import { pathToFileURL } from "node:url";

// ------------------------------------------------------------------------------------------------------- msgpack
const utf8 = new TextDecoder();

function unpack(b) {
  let at = 0;
  const take = (n) => b.subarray(at, (at += n));
  const uint = (n) => (n === 8 ? Number(take(8).readBigUInt64BE()) : take(n).readUIntBE(0, n));
  const int = (n) => (n === 8 ? Number(take(8).readBigInt64BE()) : take(n).readIntBE(0, n));
  const list = (n) => Array.from({ length: n }, one);
  const map = (n) => Object.fromEntries(Array.from({ length: n }, () => [one(), one()]));
  function one() {
    const c = uint(1);
    if (c < 0x80) return c;
    if (c < 0x90) return map(c & 15);
    if (c < 0xa0) return list(c & 15);
    if (c < 0xc0) return utf8.decode(take(c & 31));
    if (c >= 0xe0) return c - 256;
    if (c === 0xc0) return null;
    if (c === 0xc2 || c === 0xc3) return c === 0xc3;
    if (c >= 0xc4 && c <= 0xc6) return take(uint(1 << (c - 0xc4)));
    if (c === 0xca) return take(4).readFloatBE();
    if (c === 0xcb) return take(8).readDoubleBE();
    if (c >= 0xc7 && c <= 0xc9) return take(uint(1 << (c - 0xc7)) + 1) && null; // dates and the like of a configuration
    if (c >= 0xd4 && c <= 0xd8) return take((1 << (c - 0xd4)) + 1) && null;
    if (c >= 0xcc && c <= 0xcf) return uint(1 << (c - 0xcc));
    if (c >= 0xd0 && c <= 0xd3) return int(1 << (c - 0xd0));
    if (c >= 0xd9 && c <= 0xdb) return utf8.decode(take(uint(1 << (c - 0xd9))));
    if (c === 0xdc || c === 0xdd) return list(uint(c === 0xdc ? 2 : 4));
    if (c === 0xde || c === 0xdf) return map(uint(c === 0xde ? 2 : 4));
    throw new Error(`msgpack: no value begins with ${c}`);
  }
  return one();
}

function pack(value) {
  const long = (tag, n) => { const b = Buffer.alloc(5); b[0] = tag; b.writeUInt32BE(n, 1); return b; };
  if (value === null || value === undefined) return Buffer.from([0xc0]);
  if (typeof value === "boolean") return Buffer.from([value ? 0xc3 : 0xc2]);
  if (typeof value === "string") { const b = Buffer.from(value); return Buffer.concat([long(0xdb, b.length), b]); }
  if (Array.isArray(value)) return Buffer.concat([long(0xdd, value.length), ...value.map(pack)]);
  const b = Buffer.alloc(9);
  const isWhole = Number.isSafeInteger(value) && !(value instanceof Number);
  b[0] = isWhole ? 0xd3 : 0xcb;
  if (isWhole) b.writeBigInt64BE(BigInt(value), 1); else b.writeDoubleBE(Number(value), 1);
  return b;
}

// --------------------------------------------------------------------------------------------- frames and the page
const [role, , wireFd, pageFd] = process.argv.slice(2);
if (role !== "worker") { console.error("worker.mjs is started by the server"); process.exit(2); }
const socket = new Socket({ fd: Number(wireFd), readable: true, writable: true });
const now = () => Number(process.hrtime.bigint()) / 1e9;
const seconds = (value) => new Number(value); // packed as a double, also where it is whole
const finished = { count: 0n };

function send(message, bodies = []) {
  const metadata = pack(message);
  const head = Buffer.alloc(20 + 4 * bodies.length);
  head.write("mW");
  head.writeUInt16LE(1, 2);
  head.writeUInt32LE(metadata.length, 4);
  head.writeUInt32LE(bodies.length, 8);
  head.writeBigUInt64LE(BigInt(bodies.reduce((sum, body) => sum + body.length, 0)), 12);
  bodies.forEach((body, at) => head.writeUInt32LE(body.length, 20 + 4 * at));
  socket.write(Buffer.concat([head, metadata, ...bodies]));
}

function word(at, write) {
  const b = Buffer.alloc(8);
  write(b);
  writeSync(Number(pageFd), b, 0, 8, 8 * at);
}
const begin = (number) => { word(1, (b) => b.writeDoubleLE(now())); word(0, (b) => b.writeBigUInt64LE(BigInt(number))); };
const finish = () => { word(0, () => {}); word(2, (b) => b.writeBigUInt64LE(++finished.count)); };

// ------------------------------------------------------------------------------------------------------ the model
let handler;

async function load(order) {
  const [, model, , folder, , , config] = order;
  const began = now();
  try {
    process.chdir(folder);
    handler = await import(pathToFileURL(`${folder}/handler.mjs`).href);
    await handler.load?.(folder, config);
  } catch (error) {
    send(["not_loaded", "load_failed", `${model}: ${error.message}`, String(error.stack)]);
    socket.end(() => process.exit(1));
    return;
  }
  send(["loaded", seconds(now() - began), [], seconds(0), false, 0, `Node.js ${process.version}`]);
}

async function batch([, number, items], bodies) {
  begin(number);
  const began = now();
  let at = 0;
  const rows = items.map(([id, parts]) => ({
    id,
    parts: Object.fromEntries(parts.map(([name, contentType]) => [name, { body: bodies[at++], contentType }])),
  }));
  let end;
  try {
    const answers = await handler.handle(rows);
    if (answers.length !== rows.length) throw new Error(`handle gave ${answers.length} answers to ${rows.length} rows`);
    const results = answers.map((each) =>
      each instanceof Error
        ? [400, each.message, [], "bad_input", null]
        : [200, "", [["Content-Type", Buffer.isBuffer(each) ? "application/octet-stream" : "application/json"]], null, null]);
    const out = answers.map((each) =>
      each instanceof Error ? Buffer.alloc(0) : Buffer.isBuffer(each) ? each : Buffer.from(JSON.stringify(each)));
    end = [["results", number, seconds(now() - began), results], out];
  } catch (error) {
    end = [["raised", number, seconds(now() - began), "handler", "Prediction failed", 500, String(error.stack)]];
  }
  finish();
  send(...end);
}

async function obey(message, bodies) {
  const [kind, number] = message;
  if (kind === "load") await load(message);
  else if (kind === "batch") await batch(message, bodies);
  else if (kind === "batches") {
    for (const each of message[1]) {
      const count = each[2].reduce((sum, [, parts]) => sum + parts.length, 0);
      await batch(each, bodies.splice(0, count));
    }
  } else if (kind === "check") {
    send(["checked", number, seconds(0), 0, [], 0, 0, 0, [], ["a worker in another language checks no batches"]]);
  } else if (kind === "ask_health") send(["health", number, seconds(0), ""]);
  else if (kind === "stop") socket.end(() => process.exit(0));
}

let kept = Buffer.alloc(0);
let turn = Promise.resolve(); // one message after the other, in the order in which they came
socket.on("data", (data) => {
  kept = Buffer.concat([kept, data]);
  while (kept.length >= 20) {
    const count = kept.readUInt32LE(8);
    const metadata = 20 + 4 * count;
    const body = metadata + kept.readUInt32LE(4);
    const end = body + Number(kept.readBigUInt64LE(12));
    if (kept.toString("latin1", 0, 2) !== "mW" || kept.readUInt16LE(2) !== 1) process.exit(1);
    if (kept.length < end) break;
    const message = unpack(kept.subarray(metadata, body));
    const bodies = [];
    for (let at = 0, from = body; at < count; at++) {
      const length = kept.readUInt32LE(20 + 4 * at);
      bodies.push(Buffer.from(kept.subarray(from, (from += length))));
    }
    kept = kept.subarray(end);
    turn = turn.then(() => obey(message, bodies));
  }
});
socket.on("end", () => process.exit(0));
socket.on("error", () => process.exit(0));
send(["hello", process.pid, `Node.js ${process.version}`]);
