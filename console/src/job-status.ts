/** What a job is told with. */

import type { Job } from "sie-client";
import { formatDuration } from "./format";

const ENDED: readonly string[] = ["completed", "failed", "cancelled", "expired"];

export const hasEnded = ({ state }: Pick<Job, "state">): boolean => ENDED.includes(state);

/** A time of today, or with its day. */
export function formatTime(atS: number): string {
  const at = new Date(atS * 1000);
  const isToday = at.toDateString() === new Date().toDateString();
  return isToday ? at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : at.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

/** When a job will be done, and what would keep its deadline. Empty while nobody knows. */
export function forecastOf({ forecast, request }: Job): string {
  if (!forecast) return "";
  const done = `done at ${formatTime(forecast.done_at)} ± ${formatDuration(forecast.plus_minus_s)}`;
  if (!request.deadline || forecast.workers_needed == null) return done;
  return forecast.done_at <= request.deadline ? `${done}, before its deadline` : `${done}; ${forecast.workers_needed} workers would keep the deadline`;
}

/** Rows a second: of the last minutes while it runs, and of all of its time once it has ended. */
export function rateOf({ forecast, counts, started_at, ended_at }: Job): string {
  const rate = forecast?.rows_per_s ?? (started_at && ended_at && ended_at > started_at ? (counts.done ?? 0) / (ended_at - started_at) : 0);
  return rate ? `${rate.toFixed(rate < 10 ? 1 : 0)}/s` : "";
}

const SHORT_ID = 12; // characters, which tell the jobs of a list apart

/** The name of a job, or the beginning of its id. */
export const nameOf = ({ name, id }: Job): string => name || (id.length > SHORT_ID ? `${id.slice(0, SHORT_ID)}…` : id);

/** What is wrong with a job, empty where nothing is. */
export function troubleOf({ error, trouble, errors = {} }: Job): { words: string; isFailure: boolean } {
  if (error) return { words: `${error.code}: ${error.message}`, isFailure: true };
  if (trouble) return { words: `waits and tries again: ${trouble.code}: ${trouble.message}`, isFailure: false };
  const codes = Object.entries(errors).map(([code, count]) => `${code} ${count}`);
  return { words: codes.length ? `rows failed: ${codes.join(", ")}` : "", isFailure: false };
}
