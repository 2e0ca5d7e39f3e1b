// What node's own fetch, and the package eventsource, get of the models of `test_http.py`, as JSON.
//
//     node_client.mjs INFERENCE MANAGEMENT

import { EventSource } from "eventsource";

const [inference, management] = process.argv.slice(2);
const found = {};

const post = (model, body, headers = {}) => fetch(`${inference}/predictions/${model}`, { method: "POST", body, headers });

let answer = await post("total", JSON.stringify({ x: [1, 2, 3.5] }), {
  "Content-Type": "application/json",
  "X-Request-Id": "from-node",
});
found.json = [answer.status, await answer.json(), answer.headers.get("x-request-id")];

answer = await post("size", new Uint8Array(3_000_000));
found.bytes = [answer.status, await answer.json()];

const form = new FormData();
form.append("data", new Blob([new Uint8Array([0, 1])]), "a.bin");
form.append("more", new Blob(["two"]), "b.txt");
answer = await post("parts", form);
found.multipart = [answer.status, await answer.json()];

answer = await post("words", "a b c", { Accept: "text/event-stream" });
let text = "";
for await (const piece of answer.body.pipeThrough(new TextDecoderStream())) text += piece;
found.stream = [answer.headers.get("content-type"), text];

// A browser's way to follow the logs of one request.
found.followed = await new Promise((resolve, reject) => {
  const source = new EventSource(`${management}/logs?follow=true&tail=100&request=from-node&log=access`);
  const giveUp = setTimeout(() => reject(new Error("no event within 60 s")), 60_000);
  source.onmessage = (event) => {
    clearTimeout(giveUp);
    source.close();
    resolve(JSON.parse(event.data).requestId);
  };
  source.onerror = (event) => {
    clearTimeout(giveUp);
    source.close();
    reject(new Error(event.message));
  };
});

console.log(JSON.stringify(found));
