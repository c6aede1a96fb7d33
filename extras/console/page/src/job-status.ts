/** The state, the rate, the forecast and the error of a job, as text. */

import type { Job } from "sie-client";
import { formatDuration, formatTime } from "./format";

const FINAL_STATES: readonly string[] = ["completed", "failed", "cancelled", "expired"];

/** Return true if the state of a job or of a batch is final. */
export const isFinal = (state: string): boolean => FINAL_STATES.includes(state);

/** Return when a job will be done, and how many workers would keep its deadline. Empty without a forecast. */
export function forecastOf({ forecast, request }: Job): string {
  if (!forecast) return "";
  const done = `done at ${formatTime(forecast.done_at)} ± ${formatDuration(forecast.plus_minus_s)}`;
  if (!request.deadline || forecast.workers_needed == null) return done;
  return forecast.done_at <= request.deadline ? `${done}, before its deadline` : `${done}; ${forecast.workers_needed} workers would keep the deadline`;
}

/** Return the rows per second: of the last minutes while the job runs, of its whole time once it has ended. */
export function rateOf({ forecast, counts, started_at, ended_at }: Job): string {
  const rate = forecast?.rows_per_s ?? (started_at && ended_at && ended_at > started_at ? (counts.done ?? 0) / (ended_at - started_at) : 0);
  return rate ? `${rate.toFixed(rate < 10 ? 1 : 0)}/s` : "";
}

const SHORT_ID = 12; // characters, enough to tell the jobs of a list apart

/** Return the name of a job, or the beginning of its id. */
export const nameOf = ({ name, id }: Job): string => name || (id.length > SHORT_ID ? `${id.slice(0, SHORT_ID)}…` : id);

/** Return the error of a job, the reason why it waits, or the codes of its failed rows. The text is empty without any. */
export function problemOf({ error, trouble, errors = {} }: Job): { text: string; isFailure: boolean } {
  if (error) return { text: `${error.code}: ${error.message}`, isFailure: true };
  if (trouble) return { text: `waits and tries again: ${trouble.code}: ${trouble.message}`, isFailure: false };
  const codes = Object.entries(errors).map(([code, count]) => `${code} ${count}`);
  return { text: codes.length ? `rows failed: ${codes.join(", ")}` : "", isFailure: false };
}
