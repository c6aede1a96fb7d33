// One request: sent until it succeeds, fails for good, or patience ends.

import { type ErrorFacts, errorClass, invalid, NotFoundError, SIEAbortError, SIEConnectionError, SIEError, unreadable } from "./errors.js";
import { isRoute, type Session } from "./options.js";

const CONNECTION_BUDGET_MS = 120_000;
const NOBODY_BUDGET_MS = 5_000; // for a server that was never there: one that is forgotten, not one that restarts
const CAPACITY_BUDGET_MS = 900_000;
const CONNECTION_PAUSE_MS = 1_000;
const MAX_CONNECTION_PAUSE_MS = 5_000;
const MAX_COSTLY_PAUSE_MS = 30_000;
const USUAL_PAUSE_MS = 5_000;
const LEAST_PAUSE_MS = 100;
export const CONTROL_MS = 30_000; // for what is not inference
const MAX_TIMER_MS = 2 ** 31 - 1; // a longer timer ends at once

export interface Send {
  method: string;
  path: string;
  headers?: Record<string, string>;
  body?: Uint8Array<ArrayBuffer> | FormData;
  withinMs: number;
  /** An attempt without an answer is repeated only if it had no connection: a second run is another object. */
  once?: true;
}

export interface Received {
  status: number;
  headers: Headers;
  body: Uint8Array;
}

/** Shared by the parts of a call: an answer to any of them renews what the others have left. */
export class Patience {
  answers = 0;
}

/** An attempt that did not succeed, and how to go on. */
interface Failed {
  error: SIEError;
  pauseMs: number;
  maxPauseMs: number;
  /** Nobody was there, rather than nobody free. */
  isAway: boolean;
  budgetMs: number;
}

export type Waiting = (cause: string, remainingMs: number) => void;

/** Throws SIEError: that of the last attempt, whose cause is the one before. */
export async function call(
  request: Send,
  session: Session,
  patience = new Patience(),
  waiting: Waiting = () => undefined,
): Promise<Received> {
  let answers = patience.answers;
  let waitedMs = { away: 0, busy: 0 };
  const tries = { away: 0, busy: 0 };
  let previous: SIEError | undefined;
  for (;;) {
    const startedMs = performance.now();
    const answer = await attempt(request, session);
    if (!("error" in answer)) {
      patience.answers += 1;
      return answer;
    }
    const { error, pauseMs, maxPauseMs, isAway, budgetMs } = answer;
    if (answers !== patience.answers) {
      answers = patience.answers;
      waitedMs = { away: 0, busy: 0 };
    }
    const kind = isAway ? "away" : "busy";
    waitedMs[kind] += performance.now() - startedMs;
    const spread = 0.75 + Math.random() / 2; // so that clients do not come back together
    const nextMs = Math.min(maxPauseMs, pauseMs * 2 ** Math.min(tries[kind], 10)) * spread;
    tries[kind] += 1;
    const remainingMs = budgetMs - waitedMs[kind];
    error.mayHaveRun = tries.away > 0;
    if (!error.retryable || session.options.waitForCapacity === false || nextMs > remainingMs) {
      throw previous === undefined ? error : chained(error, previous, tries.away + tries.busy);
    }
    waitedMs[kind] += nextMs;
    previous = error;
    waiting(error.code || "connection", remainingMs - nextMs);
    await sleep(nextMs, session.signal);
  }
}

function chained(error: SIEError, previous: SIEError, attempts: number): SIEError {
  error.message += ` (attempt ${attempts})`;
  error.cause ??= previous;
  return error;
}

/** Throws SIEAbortError. */
export function sleep(ms: number, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(aborted(signal));
    const done = () => {
      signal?.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(done, Math.min(ms, MAX_TIMER_MS));
    const end = () => {
      clearTimeout(timer);
      reject(aborted(signal!));
    };
    signal?.addEventListener("abort", end, { once: true });
  });
}

export function aborted(signal: AbortSignal): SIEAbortError {
  const why = signal.reason instanceof Error ? `: ${signal.reason.message}` : "";
  return new SIEAbortError(`the call was aborted${why}`, { cause: signal.reason });
}

/** Throws SIEAbortError, and InvalidInputError for a request that cannot be written. */
async function attempt(request: Send, session: Session): Promise<Received | Failed> {
  const { signal } = session;
  if (signal?.aborted) throw aborted(signal);
  const ends = new AbortController();
  const end = () => ends.abort();
  signal?.addEventListener("abort", end, { once: true });
  const timer = setTimeout(end, Math.min(request.withinMs, MAX_TIMER_MS));
  try {
    const headers = { ...session.headers(), ...request.headers };
    const init: RequestInit = { method: request.method, headers, signal: ends.signal, redirect: "manual" };
    if (request.body) init.body = request.body;
    const response = await session.fetch(session.baseUrl + request.path, init);
    const body = new Uint8Array(await response.arrayBuffer());
    const answer = { status: response.status, headers: response.headers, body };
    const failed = response.ok ? undefined : judged(answer, session);
    if (!failed?.isAway) session.seen.answer = true;
    return failed ?? answer;
  } catch (error) {
    if (error instanceof SIEError) throw error;
    if (signal?.aborted) throw aborted(signal);
    return unanswered(error, request, session, ends.signal.aborted);
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", end);
  }
}

// what no waiting mends: a name that nobody has, an address that cannot be asked
const PERMANENT = new Set(["ENOTFOUND", "ERR_INVALID_URL", "ERR_INVALID_ARG_TYPE", "UND_ERR_INVALID_ARG"]);
// without a connection; a page does not learn such a code
const UNCONNECTED = new Set(["ECONNREFUSED", "EAI_AGAIN", "EHOSTUNREACH", "ENETUNREACH", "UND_ERR_CONNECT_TIMEOUT"]);

function unanswered(error: unknown, request: Send, session: Session, isLate: boolean): Failed {
  const cause = (error as { cause?: { code?: unknown; message?: unknown } } | null)?.cause;
  const code = typeof cause?.code === "string" ? cause.code : "";
  // a page is not told whether nobody was there or its origin is not allowed
  const isNobody = !isLate && !session.seen.answer && (!code || (code === "ECONNREFUSED" && isLoopback(session.baseUrl)));
  const why = isLate ? `none within ${request.withinMs} ms` : code || (error instanceof Error ? error.message : String(error));
  const hint = isNobody ? "; is a server running there, and is a page of this origin allowed to ask it (SIE_CORS_ORIGINS)?" : "";
  return {
    error: new SIEConnectionError(`no answer from ${session.baseUrl}: ${why}${hint}`, {
      retryable: request.once ? UNCONNECTED.has(code) : !PERMANENT.has(code),
      cause: error,
    }),
    ...whenAway(session, isNobody),
  };
}

function whenAway(session: Session, isNobody: boolean): Omit<Failed, "error"> {
  const budgetMs = session.options.connectionTimeoutMs ?? (isNobody ? NOBODY_BUDGET_MS : CONNECTION_BUDGET_MS);
  return { pauseMs: CONNECTION_PAUSE_MS, maxPauseMs: MAX_CONNECTION_PAUSE_MS, isAway: true, budgetMs };
}

function isLoopback(url: string): boolean {
  return /^https?:\/\/(localhost|127\.[\d.]+|\[::1\])(:|\/|$)/.test(url);
}

// what may have cost the device its time is repeated ever more slowly
const COSTLY = new Set(["GATEWAY_TIMEOUT", "RESOURCE_EXHAUSTED"]);

function judged(answer: Received, session: Session): Failed {
  const { status, headers, body } = answer;
  const document = maps(body);
  const details = isMap(document["error"]) ? { ...document["error"] } : {};
  if (Array.isArray(document["errors"])) details["errors"] = document["errors"];
  const code = String(headers.get("x-sie-error-code") || (details["code"] ?? "")); // another API's shape has its own in the body
  const isProxy = !code && [502, 503, 504].includes(status); // its answer: there is nobody behind it
  const says = headers.get("x-should-retry");
  const message = details["message"] ?? `status ${status}, which SIE does not answer with here: is this its base URL?`;
  const retryAfter = headers.get("retry-after");
  const toldMs = retryAfter === null || !Number.isFinite(Number(retryAfter)) ? undefined : Number(retryAfter) * 1000;
  const facts: ErrorFacts = {
    code,
    status,
    requestId: String(details["request_id"] ?? headers.get("x-sie-request-id") ?? ""),
    retryable: isProxy || (says === null ? details["retryable"] === true : says.toLowerCase() === "true"),
    details,
  };
  if (toldMs !== undefined) facts.retryAfterMs = toldMs;
  const error = new (errorClass(code, status))(`${code || status}: ${String(message)}`, facts);
  if (isProxy) return { error, ...whenAway(session, false) };
  const pauseMs = Math.max(LEAST_PAUSE_MS, toldMs ?? USUAL_PAUSE_MS);
  const maxPauseMs = Math.max(pauseMs, COSTLY.has(code) ? MAX_COSTLY_PAUSE_MS : 0);
  const budgetMs = session.options.provisionTimeoutMs ?? CAPACITY_BUDGET_MS;
  return { error, pauseMs, maxPauseMs, isAway: false, budgetMs };
}

export function isMap(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function maps(body: Uint8Array): Record<string, unknown> {
  try {
    const value: unknown = JSON.parse(new TextDecoder().decode(body));
    return isMap(value) ? value : {};
  } catch {
    return {};
  }
}

/** What a function makes of an answer. Throws ServerError for one that is not as it should be. */
export function reading<T>(answer: Received, function_: (body: Uint8Array) => T): T {
  try {
    return function_(answer.body);
  } catch (error) {
    const cause = error instanceof Error ? error.message : String(error);
    throw unreadable(cause, answer.headers.get("x-sie-request-id") ?? "", error);
  }
}

/**
 * What a call replies as JSON, once `check` has not thrown for it. `path` begins with a slash, and names a route below the
 * base URL. `body`: sent as JSON, undefined for none.
 */
export async function json(
  method: string,
  path: string,
  session: Session,
  body: unknown,
  withinMs: number,
  check: (value: unknown) => void = () => undefined,
): Promise<unknown> {
  // the key is sent there, and `..` would lead to another route
  if (typeof path !== "string" || !isRoute(path)) {
    throw invalid("path: expected a route, such as /v1/models", "path");
  }
  const request: Send = { method, path, headers: { accept: "application/json" }, withinMs };
  if (body !== undefined) {
    request.headers!["content-type"] = "application/json";
    try {
      request.body = new TextEncoder().encode(JSON.stringify(body));
    } catch (error) {
      throw invalid(`body: ${error instanceof Error ? error.message : String(error)}`, "", error);
    }
  }
  return reading(await call(request, session), (bytes) => {
    const value: unknown = JSON.parse(new TextDecoder().decode(bytes));
    check(value);
    return value;
  });
}

/** A call whose body, if any, is JSON, and whose reply is a map with these names. */
export async function jsonCall<T extends object>(
  method: string,
  path: string,
  session: Session,
  expected: readonly (string & keyof T)[],
  body?: unknown,
): Promise<T> {
  const reply = await json(method, path, session, body, CONTROL_MS, (body) => {
    if (!isMap(body)) throw new TypeError("expected a map");
    const absent = expected.filter((name) => !(name in body));
    if (absent.length) throw new TypeError(`expected ${absent.join(", ")}`);
  });
  return reply as T;
}

/** Deletes an object. One that is not there is no error after an attempt without an answer, which may have deleted it. */
export async function deleteCall(path: string, session: Session): Promise<void> {
  try {
    await jsonCall("DELETE", path, session, []);
  } catch (error) {
    if (!(error instanceof NotFoundError && error.mayHaveRun)) throw error;
  }
}
