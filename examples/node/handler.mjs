// A model of handwritten digits in JavaScript: scores = pixels · weights + bias, and the digit with the best score.
import { readFileSync } from "node:fs";

let model;

export function load(folder) {
  model = JSON.parse(readFileSync(`${folder}/weights.json`)); // {weights: [64][10], bias: [10]}
}

export function handle(rows) {
  return rows.map((row) => {
    let pixels;
    try {
      pixels = JSON.parse(row.parts.body.body).pixels;
    } catch {
      return new Error("the body is no JSON");
    }
    if (!Array.isArray(pixels) || pixels.length !== model.weights.length) {
      return new Error(`pixels must be a list of ${model.weights.length} numbers`);
    }
    const scores = model.bias.map((bias, k) => pixels.reduce((sum, pixel, at) => sum + pixel * model.weights[at][k], bias));
    return { digit: scores.indexOf(Math.max(...scores)), scores };
  });
}
