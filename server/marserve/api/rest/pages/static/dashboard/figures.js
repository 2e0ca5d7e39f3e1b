// Figures as text. Pure.

export const DASH = "–";
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// Three digits that count: 12.3, 0.123, 1,230.
export function rounded(value) {
  if (!isNumber(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export const rate = (value) => (isNumber(value) ? (value > 0 && value < 0.01 ? "< 0.01" : rounded(value)) : DASH);

export function milliseconds(value) {
  if (!isNumber(value)) return DASH;
  if (value >= 60_000) return `${rounded(value / 60_000)} min`;
  if (value >= 1000) return `${rounded(value / 1000)} s`;
  return `${rounded(value)} ms`;
}

export function bytes(value) {
  if (!isNumber(value)) return DASH;
  let size = value;
  for (const unit of ["bytes", "KiB", "MiB", "GiB", "TiB"]) {
    if (size < 1024 || unit === "TiB") return `${unit === "bytes" ? size : rounded(size)} ${unit}`;
    size /= 1024;
  }
  return DASH;
}

export const percent = (share) => (isNumber(share) ? `${rounded(share * 100)} %` : DASH);
export const counted = (number, one, many = `${one}s`) => `${isNumber(number) ? number.toLocaleString("en") : DASH} ${number === 1 ? one : many}`;
