// Live charts: lines or stacked areas on a canvas by uPlot, with their newest figures and a table as text.

import { html, useEffect, useRef, useState } from "../vendored/htm-preact.module.js";

const SHOWN_S = 300;
const HEIGHT = 170;
const TABLE_ROWS = 10;
const timeOf = (at) => new Date(at * 1000).toLocaleTimeString("en", { hour12: false });

// `series` are `{ name, colour, read }`: a name, one of the CSS's `--line-…`, and a row's value. `format` gives its text.
export function Chart({ title, samples, series, format, isStacked = false }) {
  const place = useRef(null);
  const chart = useRef(null);
  const [at, setAt] = useState(null); // the row under the pointer
  const [round, setRound] = useState(0); // counts changes of the colour scheme
  const { rows } = samples;
  const shape = series.map((each) => each.name).join();

  useEffect(() => {
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const repaint = () => setRound((before) => before + 1);
    scheme.addEventListener("change", repaint);
    return () => scheme.removeEventListener("change", repaint);
  }, []);
  useEffect(() => {
    if (!globalThis.uPlot) return undefined;
    const width = () => Math.max(100, place.current.clientWidth);
    chart.current = new uPlot(optionsOf(series, format, width(), isStacked, setAt), dataOf(samples, series, isStacked), place.current);
    const resized = new ResizeObserver(() => chart.current.setSize({ width: width(), height: HEIGHT }));
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      chart.current.destroy();
      chart.current = null;
    };
  }, [shape, round]);
  useEffect(() => { if (chart.current) chart.current.setData(dataOf(samples, series, isStacked)); });

  const shown = at !== null && rows[at] ? rows[at] : samples.last;
  const seen = rows.filter((row) => series.some((each) => Number.isFinite(each.read(row)))).slice(-TABLE_ROWS).reverse();
  const words = seen.length ? series.map((each) => `${each.name} ${format(each.read(seen[0]))}`).join(", ") : "nothing yet";
  return html`<figure class="chart card">
    <figcaption><strong>${title}</strong>
      <span class="legend">${series.map((each) => html`<span key=${each.name}><i class=${`line-${each.colour}`}></i>${each.name} <b>${format(shown && each.read(shown))}</b></span>`)}</span>
    </figcaption>
    <div class="plot" role="img" aria-label=${`${title}, the last five minutes. Now: ${words}.`} ref=${place}></div>
    ${!globalThis.uPlot && html`<p class="muted">The chart's program could not be read from the server; the table has its figures.</p>`}
    <details class="more"><summary>As a table</summary>
      <table class="figures"><thead><tr><th scope="col">Time</th>${series.map((each) => html`<th scope="col" class="number">${each.name}</th>`)}</tr></thead>
        <tbody>${seen.map((row) => html`<tr key=${row.at}><th scope="row">${timeOf(row.at)}</th>${series.map((each) => html`<td class="number">${format(each.read(row))}</td>`)}</tr>`)}</tbody></table>
    </details>
  </figure>`;
}

function dataOf(samples, series, isStacked) {
  const [times, ...columns] = samples.columns(...series.map((each) => each.read));
  if (!isStacked) return [times, ...columns];
  // Each area stands on those before it.
  let below = times.map(() => 0);
  const stacked = columns.map((column) => {
    below = column.map((value, index) => (value === null && columns.every((each) => each[index] === null) ? null : below[index] + (value || 0)));
    return below;
  });
  return [times, ...stacked];
}

function optionsOf(series, format, width, isStacked, setAt) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--border"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  return {
    width,
    height: HEIGHT,
    padding: [8, 8, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
    scales: {
      x: { range: () => { const now = Date.now() / 1000; return [now - SHOWN_S, now]; } },
      y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] },
    },
    axes: [
      { ...axis, space: 90, incrs: [60, 120, 300], values: (_, times) => times.map((at) => timeOf(at).slice(0, 5)), size: 28 },
      { ...axis, space: 40, values: (_, values) => values.map(format), size: 64 },
    ],
    series: [
      {},
      ...series.map((each) => ({
        stroke: colour(`--line-${each.colour}`),
        fill: isStacked ? colour(`--line-${each.colour}`) : undefined,
        width: isStacked ? 0 : 2,
        points: { show: false },
      })),
    ],
    // An area ends where the one below it begins.
    bands: isStacked ? series.slice(1).map((_, index) => ({ series: [index + 2, index + 1] })) : undefined,
    hooks: { setCursor: [(plot) => setAt(plot.cursor.idx ?? null)] },
  };
}

export const RATE = [{ name: "answers a second", colour: "a", read: (row) => row.rate }];
export const LATENCY = [
  { name: "p50", colour: "b", read: (row) => row.p50 },
  { name: "p95", colour: "a", read: (row) => row.p95 },
  { name: "p99", colour: "c", read: (row) => row.p99 },
];
