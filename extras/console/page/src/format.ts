/** Sizes, times and values as text. */

/** Return a size in powers of 1,024. */
export function formatBytes(count: number): string {
  const step = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, count)) / 10)));
  return `${(count / 2 ** (10 * step)).toFixed(step > 2 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][step]}`;
}

/** Return an estimated size with two digits, in powers of 1,000 as the Hugging Face Hub counts. */
export function approximateBytes(count: number): string {
  const rounded = Number(count.toPrecision(2));
  const power = Math.min(3, Math.max(0, Math.floor(Math.log10(Math.max(1, rounded)) / 3)));
  return `about ${+(rounded / 1000 ** power).toPrecision(3)} ${["B", "kB", "MB", "GB"][power]}`;
}

export function formatDuration(seconds: number): string {
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** Return a time of the clock, with its day unless that is today. */
export function formatTime(atS: number): string {
  const at = new Date(atS * 1000);
  const isToday = at.toDateString() === new Date().toDateString();
  return isToday ? at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : at.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

/** Return a text as it is, undefined as an empty text, and any other value as JSON. */
export const formatValue = (value: unknown): string => (value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));
