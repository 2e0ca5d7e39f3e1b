// What happened between two answers of the server, and a list of it that never grows. Pure.

export const KEPT = 150; // samples: five minutes of two seconds

// Rows of `{ at, … }`, oldest first; `at` in seconds since 1970. A pause leaves an empty row, so that no line crosses it.
export class Samples {
  constructor(longestGapS, kept = KEPT) {
    this.rows = [];
    this.longestGapS = longestGapS;
    this.kept = kept;
  }

  get last() { return this.rows[this.rows.length - 1]; }

  add(row) {
    const { last } = this;
    if (last && row.at <= last.at) return;
    if (last && row.at - last.at > this.longestGapS) this.rows.push({ at: last.at + 0.001 });
    this.rows.push(row);
    this.rows.splice(0, this.rows.length - this.kept);
  }

  // The newest row at least so many seconds old, else the oldest, that has this member.
  since(seconds, member) {
    const having = this.rows.filter((row) => row[member] !== undefined);
    const end = having.length ? having[having.length - 1].at - seconds : 0;
    return [...having].reverse().find((row) => row.at <= end) || having[0];
  }

  // As charts take them: a list of times and one of each of these values, null where there is none.
  columns(...reads) {
    return [this.rows.map((row) => row.at), ...reads.map((read) => this.rows.map((row) => read(row) ?? null))];
  }
}

// What a histogram `{ upTo, counts, sum }` grew by: null where it is another one, as after a restart of the server.
export function between(before, after) {
  if (!before || !after || before.counts.length !== after.counts.length) return null;
  const counts = after.counts.map((count, index) => count - before.counts[index]);
  if (counts.some((count) => count < 0)) return null;
  const count = counts.reduce((all, each) => all + each, 0);
  return { count, mean: count ? (after.sum - before.sum) / count : null, quantile: (part) => quantile(part, after.upTo, counts) };
}

// The value that this part of the counted values stays under, read off between two bounds; null without a value.
export function quantile(part, bounds, counts) {
  const wanted = part * counts.reduce((all, each) => all + each, 0);
  if (!wanted) return null;
  let below = 0;
  for (let index = 0; index < bounds.length; index++) {
    if (counts[index] && below + counts[index] >= wanted) {
      const low = index ? bounds[index - 1] : 0;
      return low + ((bounds[index] - low) * (wanted - below)) / counts[index];
    }
    below += counts[index];
  }
  return bounds[bounds.length - 1];
}

// One row of a chart: what requests did since the row before. `times` are counted until `serverAt`, by the server's clock;
// both are kept for the next row.
export function rowOf(before, times, serverAt) {
  const row = { at: Date.now() / 1000, times, serverAt };
  const grown = before && before.serverAt < serverAt ? between(before.times, times) : null;
  if (!grown) return row;
  return { ...row, rate: grown.count / (serverAt - before.serverAt), p50: grown.quantile(0.5), p95: grown.quantile(0.95), p99: grown.quantile(0.99) };
}

// Whole percents of sum 100 in the place of weights, by the largest remainders.
export function percentsOf(weights) {
  const names = Object.keys(weights);
  const sum = names.reduce((all, name) => all + Math.max(0, weights[name]), 0);
  if (!sum) return Object.fromEntries(names.map((name) => [name, 0]));
  const exact = names.map((name) => (100 * Math.max(0, weights[name])) / sum);
  const whole = exact.map(Math.floor);
  const byRest = names.map((_, index) => index).sort((a, b) => exact[b] - whole[b] - (exact[a] - whole[a]) || a - b);
  for (const index of byRest.slice(0, 100 - whole.reduce((all, each) => all + each, 0))) whole[index] += 1;
  return Object.fromEntries(names.map((name, index) => [name, whole[index]]));
}

// Percents with one of them changed: the others share the rest as they did before, or evenly if they had nothing.
export function withPercent(percents, name, value) {
  const others = Object.keys(percents).filter((each) => each !== name);
  const wanted = others.length ? Math.min(100, Math.max(0, Math.round(value))) : 100;
  const rest = 100 - wanted;
  const had = others.reduce((all, each) => all + percents[each], 0);
  const shares = percentsOf(Object.fromEntries(others.map((each) => [each, had ? percents[each] : 1])));
  const exact = Object.fromEntries(others.map((each) => [each, (shares[each] * rest) / 100]));
  const whole = Object.fromEntries(others.map((each) => [each, Math.floor(exact[each])]));
  const missing = rest - others.reduce((all, each) => all + whole[each], 0);
  const byRest = [...others].sort((a, b) => exact[b] - whole[b] - (exact[a] - whole[a]));
  for (const each of byRest.slice(0, missing)) whole[each] += 1;
  return Object.fromEntries(Object.keys(percents).map((each) => [each, each === name ? wanted : whole[each]]));
}
