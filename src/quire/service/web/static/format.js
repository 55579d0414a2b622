// Numbers and times for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count) {
  let value = Number(count);
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

// Beyond 2^53 a number arrives as text, which must not be rounded either.
export const number = (value) => (typeof value === "string" ? BigInt(value) : Number(value)).toLocaleString("en");
export const words = (name) => String(name).replaceAll("_", " ");
export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

export function span(milliseconds) {
  const seconds = Math.max(0, milliseconds) / 1000;
  if (seconds < 1) return "a moment";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export const ago = (at, now) => (at ? `${span(now - at)} ago` : "never");

const two = (value) => String(value).padStart(2, "0");

export function clock(at) {
  const moment = new Date(at);
  return `${two(moment.getHours())}:${two(moment.getMinutes())}:${two(moment.getSeconds())}`;
}

export function moment(at) {
  if (!at) return "–";
  const date = new Date(at);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(at)}`;
}

export const dbLink = (name) => `#/db/${encodeURIComponent(name)}`;
export const snapshotName = (one) => (one.name ? `@${one.name}` : `#${one.snapshot_id}`);
