// A worker of marserve in JavaScript: speaks the wire of docs/worker-wire.md, and calls the archive's handler.mjs.
//
//   workerProgram: [node, worker.mjs]        # in model-config.yaml; handler.mjs exports load(folder, config), handle(rows)
import { writeSync } from "node:fs";
import { Socket } from "node:net";
import { pathToFileURL } from "node:url";

const made = (size, write) => { const b = Buffer.alloc(size); write(b); return b; };

// ------------------------------------------------------------------------------------------------------- msgpack
function unpack(b) {
  let at = 0;
  const take = (n) => b.subarray(at, (at += n));
  const text = (n) => take(n).toString();
  const uint = (n) => (n === 8 ? Number(take(8).readBigUInt64BE()) : take(n).readUIntBE(0, n));
  const int = (n) => (n === 8 ? Number(take(8).readBigInt64BE()) : take(n).readIntBE(0, n));
  const list = (n) => Array.from({ length: n }, one);
  const map = (n) => Object.fromEntries(Array.from({ length: n }, () => [one(), one()]));
  const extension = (n) => take(n + 1) && null; // dates and the like of a configuration
  function one() {
    const c = uint(1);
    if (c < 0x80 || c >= 0xe0) return c < 0x80 ? c : c - 256;
    if (c < 0x90) return map(c & 15);
    if (c < 0xa0) return list(c & 15);
    if (c < 0xc0) return text(c & 31);
    if (c === 0xc0) return null;
    if (c <= 0xc3) return c === 0xc3;
    if (c <= 0xc6) return take(uint(1 << (c - 0xc4)));
    if (c <= 0xc9) return extension(uint(1 << (c - 0xc7)));
    if (c <= 0xcb) return c === 0xca ? take(4).readFloatBE() : take(8).readDoubleBE();
    if (c <= 0xcf) return uint(1 << (c - 0xcc));
    if (c <= 0xd3) return int(1 << (c - 0xd0));
    if (c <= 0xd8) return extension(1 << (c - 0xd4));
    if (c <= 0xdb) return text(uint(1 << (c - 0xd9)));
    return (c <= 0xdd ? list : map)(uint(c & 1 ? 4 : 2));
  }
  return one();
}

function pack(value) {
  const long = (tag, n) => made(5, (b) => b.writeUInt32BE(n, b.writeUInt8(tag)));
  if (value === null) return Buffer.from([0xc0]);
  if (typeof value === "boolean") return Buffer.from([value ? 0xc3 : 0xc2]);
  if (typeof value === "string") return Buffer.concat([long(0xdb, Buffer.byteLength(value)), Buffer.from(value)]);
  if (Array.isArray(value)) return Buffer.concat([long(0xdd, value.length), ...value.map(pack)]);
  if (value instanceof Number) return made(9, (b) => b.writeDoubleBE(Number(value), b.writeUInt8(0xcb)));
  return made(9, (b) => b.writeBigInt64BE(BigInt(value), b.writeUInt8(0xd3)));
}
const seconds = (value) => new Number(value); // packed as a double, also where it is whole

// --------------------------------------------------------------------------------------------- frames and the page
const [role, , wireFd, pageFd] = process.argv.slice(2);
if (role !== "worker") { console.error("worker.mjs is started by the server"); process.exit(2); }
const socket = new Socket({ fd: Number(wireFd), readable: true, writable: true });

const uint32 = (n) => made(4, (b) => b.writeUInt32LE(n));
const uint64 = (n) => made(8, (b) => b.writeBigUInt64LE(BigInt(n)));

function send(message, bodies = []) {
  const [metadata, total] = [pack(message), bodies.reduce((sum, body) => sum + body.length, 0)];
  const sizes = [uint32(metadata.length), uint32(bodies.length), uint64(total), ...bodies.map((body) => uint32(body.length))];
  socket.write(Buffer.concat([Buffer.from("mW\x01\x00"), ...sizes, metadata, ...bodies]));
}

let finished = 0;
const now = () => Number(process.hrtime.bigint()) / 1e9;
const word = (at, b) => writeSync(Number(pageFd), b, 0, 8, 8 * at);
const begin = (number) => { word(1, made(8, (b) => b.writeDoubleLE(now()))); word(0, uint64(number)); };
const finish = () => { word(0, uint64(0)); word(2, uint64(++finished)); };

// ------------------------------------------------------------------------------------------------------ the model
let handler;

async function load([, model, , folder, , , config]) {
  const began = now();
  try {
    process.chdir(folder);
    handler = await import(pathToFileURL(`${folder}/handler.mjs`).href);
    await handler.load?.(folder, config);
    send(["loaded", seconds(now() - began), [], seconds(0), false, 0, `Node.js ${process.version}`]);
  } catch (error) {
    send(["not_loaded", "load_failed", `${model}: ${error.message}`, String(error.stack)]);
    socket.end(() => process.exit(1));
  }
}

function encode(answer) { // a result and its body
  if (answer instanceof Error) return [[400, answer.message, [], "bad_input", null], Buffer.alloc(0)];
  const [type, body] = Buffer.isBuffer(answer)
    ? ["application/octet-stream", answer]
    : ["application/json", Buffer.from(JSON.stringify(answer))];
  return [[200, "", [["Content-Type", type]], null, null], body];
}

async function batch([, number, items], bodies) { // takes its bodies from the front
  begin(number);
  const began = now();
  const partOf = ([name, contentType]) => [name, { body: bodies.shift(), contentType }];
  const rows = items.map(([id, parts]) => ({ id, parts: Object.fromEntries(parts.map(partOf)) }));
  let end;
  try {
    const answers = await handler.handle(rows);
    if (answers.length !== rows.length) throw new Error(`handle gave ${answers.length} answers to ${rows.length} rows`);
    const encoded = answers.map(encode);
    end = [["results", number, seconds(now() - began), encoded.map(([result]) => result)], encoded.map(([, body]) => body)];
  } catch (error) {
    end = [["raised", number, seconds(now() - began), "handler", "Prediction failed", 500, String(error.stack)]];
  }
  finish();
  send(...end);
}

const unchecked = ["a worker in another language checks no batches"];
const orders = {
  load,
  batch,
  batches: async ([, all], bodies) => { for (const each of all) await batch(each, bodies); },
  check: ([, number]) => send(["checked", number, seconds(0), 0, [], 0, 0, 0, [], unchecked]),
  ask_health: ([, number]) => send(["health", number, seconds(0), ""]),
  stop: () => socket.end(() => process.exit(0)),
};

let kept = Buffer.alloc(0);
let turn = Promise.resolve(); // one message after the other, in the order in which they came
socket.on("data", (data) => {
  kept = Buffer.concat([kept, data]);
  while (kept.length >= 20) {
    if (kept.toString("latin1", 0, 2) !== "mW" || kept.readUInt16LE(2) !== 1) process.exit(1);
    const [frame, length, count] = [kept, kept.readUInt32LE(4), kept.readUInt32LE(8)];
    let at = 20 + 4 * count;
    const end = at + length + Number(frame.readBigUInt64LE(12));
    if (frame.length < end) break;
    const take = (n) => frame.subarray(at, (at += n));
    const message = unpack(take(length));
    const bodies = Array.from({ length: count }, (_, index) => take(frame.readUInt32LE(20 + 4 * index)));
    kept = frame.subarray(end);
    turn = turn.then(() => orders[message[0]]?.(message, bodies));
  }
});
for (const event of ["end", "error"]) socket.on(event, () => process.exit(0));
send(["hello", process.pid, `Node.js ${process.version}`]);
