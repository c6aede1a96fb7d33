// One request, which is sent until it succeeds, a retry is useless, or the waiting time is used up.

import { type ErrorFacts, errorClass, invalid, NotFoundError, SIEAbortError, SIEConnectionError, SIEError, unreadable } from "./errors.js";
import { isRoute, type Session } from "./options.js";

export const CONNECTION_BUDGET_MS = 120_000;
// time for retries if this server has never answered: probably none runs there
const NOBODY_BUDGET_MS = 5_000;
const CAPACITY_BUDGET_MS = 900_000;
const CONNECTION_PAUSE_MS = 1_000;
const MAX_CONNECTION_PAUSE_MS = 5_000;
const MAX_COSTLY_PAUSE_MS = 30_000;
const DEFAULT_PAUSE_MS = 5_000;
const MIN_PAUSE_MS = 100;
export const CONTROL_MS = 30_000; // time for the answer to a request without inference
const MAX_TIMER_MS = 2 ** 31 - 1; // a longer timer would end at once

/** HTTP request. It fails if no byte of the answer arrives for `withinMs`. */
export interface Send {
  method: string;
  path: string;
  headers?: Record<string, string>;
  body?: Uint8Array<ArrayBuffer> | FormData;
  withinMs: number;
  /** After an attempt without an answer of the server, send the request again only if no connection was made: it creates an object. */
  once?: true;
}

/** HTTP response with its whole body. */
export interface Received {
  status: number;
  headers: Headers;
  body: Uint8Array;
}

/** Number of answers to all parts of a call. After each answer, the waiting times of all parts start again at 0. */
export class Patience {
  answers = 0;
}

/** Failure of an attempt, and limits for the next attempts. */
interface FailedAttempt {
  error: SIEError;
  pauseMs: number;
  maxPauseMs: number;
  /** True without a connection to the server, false for an error of the server. */
  isAway: boolean;
  budgetMs: number;
}

/** Callback before a pause. `cause`: an error code, or `connection`. `remainingMs`: time left for waiting after it. */
export type OnWait = (cause: string, remainingMs: number) => void;

/**
 * Send a request until it succeeds, a retry is useless or not allowed, or the waiting time is used up. Throws the SIEError
 * of the last attempt. Its `cause` is the error of `fetch`, or else the error of the attempt before.
 */
export async function call(
  request: Send,
  session: Session,
  patience = new Patience(),
  onWait: OnWait = () => undefined,
): Promise<Received> {
  let answers = patience.answers;
  let waitedMs = { away: 0, busy: 0 };
  const tries = { away: 0, busy: 0 };
  let previous: SIEError | undefined;
  for (;;) {
    const startedMs = performance.now();
    const answer = await sendOnce(request, session);
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
    const spread = 0.75 + Math.random() / 2; // clients that failed together do not retry together
    const delayMs = Math.min(maxPauseMs, pauseMs * 2 ** Math.min(tries[kind], 10)) * spread;
    tries[kind] += 1;
    const remainingMs = budgetMs - waitedMs[kind];
    error.mayHaveRun = tries.away > 0;
    if (!error.retryable || session.options.waitForCapacity === false || delayMs > remainingMs) {
      throw previous === undefined ? error : addPrevious(error, previous, tries.away + tries.busy);
    }
    waitedMs[kind] += delayMs;
    previous = error;
    onWait(error.code || "connection", remainingMs - delayMs);
    await sleep(delayMs, session.signal);
  }
}

function addPrevious(error: SIEError, previous: SIEError, attempts: number): SIEError {
  error.message += ` (attempt ${attempts})`;
  error.cause ??= previous;
  return error;
}

/** Wait until `ms` have passed. Throws SIEAbortError. */
export function sleep(ms: number, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(abortError(signal));
    const finish = () => {
      signal?.removeEventListener("abort", abort);
      resolve();
    };
    const timer = setTimeout(finish, Math.min(ms, MAX_TIMER_MS));
    const abort = () => {
      clearTimeout(timer);
      reject(abortError(signal!));
    };
    signal?.addEventListener("abort", abort, { once: true });
  });
}

export function abortError(signal: AbortSignal): SIEAbortError {
  const reason = signal.reason instanceof Error ? `: ${signal.reason.message}` : "";
  return new SIEAbortError(`the call was aborted${reason}`, { cause: signal.reason });
}

/** Send a request once. Throws SIEAbortError. */
async function sendOnce(request: Send, session: Session): Promise<Received | FailedAttempt> {
  const { signal } = session;
  if (signal?.aborted) throw abortError(signal);
  const controller = new AbortController();
  const abort = () => controller.abort();
  signal?.addEventListener("abort", abort, { once: true });
  const startTimer = () => setTimeout(abort, Math.min(request.withinMs, MAX_TIMER_MS));
  let timer = startTimer();
  const restartTimer = () => {
    clearTimeout(timer);
    timer = startTimer();
  };
  try {
    const headers = { ...session.headers(), ...request.headers };
    const init: RequestInit = { method: request.method, headers, signal: controller.signal, redirect: "manual" };
    if (request.body) init.body = request.body;
    const response = await session.fetch(session.baseUrl + request.path, init);
    restartTimer();
    const body = await readBytes(response, restartTimer);
    const answer = { status: response.status, headers: response.headers, body };
    const failure = response.ok ? undefined : readFailure(answer, request, session);
    if (!failure?.isAway) session.server.hasAnswered = true;
    return failure ?? answer;
  } catch (error) {
    if (error instanceof SIEError) throw error;
    if (signal?.aborted) throw abortError(signal);
    return transportFailure(error, request, session, controller.signal.aborted);
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", abort);
  }
}

/** Read a whole body. `onPiece` is called after each piece of it. */
async function readBytes({ body }: Response, onPiece: () => void): Promise<Uint8Array> {
  const pieces: Uint8Array[] = [];
  let length = 0;
  const reader = body?.getReader();
  for (let piece = await reader?.read(); piece?.value; piece = await reader?.read()) {
    onPiece();
    pieces.push(piece.value);
    length += piece.value.length;
  }
  if (pieces.length === 1) return pieces[0]!;
  const whole = new Uint8Array(length);
  let end = 0;
  for (const piece of pieces) {
    whole.set(piece, end);
    end += piece.length;
  }
  return whole;
}

// codes of errors that stay after a retry: an unknown host name, an invalid address or argument, plain http at a port of an
// https address, a certificate that is not trusted
const PERMANENT = new Set([
  "ENOTFOUND", "ERR_INVALID_URL", "ERR_INVALID_ARG_TYPE", "UND_ERR_INVALID_ARG", "ERR_SSL_WRONG_VERSION_NUMBER",
  "ERR_TLS_CERT_ALTNAME_INVALID", "CERT_HAS_EXPIRED", "CERT_NOT_YET_VALID", "DEPTH_ZERO_SELF_SIGNED_CERT", "SELF_SIGNED_CERT_IN_CHAIN",
  "UNABLE_TO_GET_ISSUER_CERT", "UNABLE_TO_GET_ISSUER_CERT_LOCALLY", "UNABLE_TO_VERIFY_LEAF_SIGNATURE",
]);
// codes of errors before a connection was made; a browser hides them from a page
const UNCONNECTED = new Set(["ECONNREFUSED", "EAI_AGAIN", "EHOSTUNREACH", "ENETUNREACH", "UND_ERR_CONNECT_TIMEOUT"]);

/** Describe an attempt without an answer. `isLate`: `withinMs` of the request has passed. */
function transportFailure(error: unknown, request: Send, session: Session, isLate: boolean): FailedAttempt {
  const cause = (error as { cause?: { code?: unknown; message?: unknown } } | null)?.cause;
  const code = typeof cause?.code === "string" ? cause.code : "";
  // without a code in a page: the browser does not say if no server runs there or if the page's origin is not allowed
  const isNobody = !isLate && !session.server.hasAnswered && (!code || (code === "ECONNREFUSED" && isLoopback(session.baseUrl)));
  const text = typeof cause?.message === "string" ? cause.message : error instanceof Error ? error.message : String(error);
  const reason = isLate ? `none within ${request.withinMs} ms` : code || text;
  const hint = isNobody ? "; does a server run there? In a page: does SIE_CORS_ORIGINS of the server name the origin of the page?" : "";
  return {
    error: new SIEConnectionError(`no answer from ${session.baseUrl}: ${reason}${hint}`, {
      retryable: request.once ? UNCONNECTED.has(code) : !PERMANENT.has(code),
      cause: error,
    }),
    ...connectionLimits(session, isNobody),
  };
}

function connectionLimits(session: Session, isNobody: boolean): Omit<FailedAttempt, "error"> {
  const budgetMs = session.options.connectionTimeoutMs ?? (isNobody ? NOBODY_BUDGET_MS : CONNECTION_BUDGET_MS);
  return { pauseMs: CONNECTION_PAUSE_MS, maxPauseMs: MAX_CONNECTION_PAUSE_MS, isAway: true, budgetMs };
}

function isLoopback(url: string): boolean {
  return /^https?:\/\/(localhost|127\.[\d.]+|\[::1\])(:|\/|$)/.test(url);
}

// errors after which the device may have done the work for nothing: the pauses between attempts grow
const COSTLY = new Set(["GATEWAY_TIMEOUT", "RESOURCE_EXHAUSTED"]);

/** Read a response that is not a success. */
function readFailure(answer: Received, request: Send, session: Session): FailedAttempt {
  const { status, headers, body } = answer;
  const document = parseMap(body);
  const details = isMap(document["error"]) ? { ...document["error"] } : {};
  if (Array.isArray(document["errors"])) details["errors"] = document["errors"];
  // the header comes first: in routes of another API's format, the code in the body is that API's code
  const code = headers.get("x-sie-error-code") || (typeof details["code"] === "string" ? details["code"] : ""); // a proxy's may be a number
  const isProxy = !code && [502, 503, 504].includes(status); // answer of a proxy: the server behind it does not run
  const shouldRetry = headers.get("x-should-retry");
  // a page gets the status 0 in place of a redirect
  const message = details["message"] ?? `${status ? `status ${status}` : "an answer"} without an error of SIE: is the base URL right?`;
  const retryAfter = Number(headers.get("retry-after")?.trim() || NaN);
  const retryAfterMs = Number.isFinite(retryAfter) ? retryAfter * 1000 : undefined;
  const facts: ErrorFacts = {
    code,
    status,
    requestId: String(details["request_id"] ?? headers.get("x-sie-request-id") ?? ""),
    retryable: isProxy ? !request.once : shouldRetry === null ? details["retryable"] === true : shouldRetry.toLowerCase() === "true",
    details,
  };
  if (retryAfterMs !== undefined) facts.retryAfterMs = retryAfterMs;
  const error = new (errorClass(code, status))(`${code || status || "redirect"}: ${String(message)}`, facts);
  if (isProxy) return { error, ...connectionLimits(session, false) };
  const pauseMs = Math.max(MIN_PAUSE_MS, retryAfterMs ?? DEFAULT_PAUSE_MS);
  const maxPauseMs = Math.max(pauseMs, COSTLY.has(code) ? MAX_COSTLY_PAUSE_MS : 0);
  const budgetMs = session.options.provisionTimeoutMs ?? CAPACITY_BUDGET_MS;
  return { error, pauseMs, maxPauseMs, isAway: false, budgetMs };
}

export function isMap(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function parseMap(body: Uint8Array): Record<string, unknown> {
  try {
    const value: unknown = JSON.parse(new TextDecoder().decode(body));
    return isMap(value) ? value : {};
  } catch {
    return {};
  }
}

/** Return the result of `read` for the body of an answer. Throws ServerError if `read` throws. */
export function readBody<T>(answer: Received, read: (body: Uint8Array) => T): T {
  try {
    return read(answer.body);
  } catch (error) {
    const cause = error instanceof Error ? error.message : String(error);
    throw unreadable(cause, answer.headers.get("x-sie-request-id") ?? "", error);
  }
}

/**
 * Send a request and return the JSON of its reply. `path`: a route below the base URL, such as `/v1/models`. `body`: sent
 * as JSON; undefined: no body. `check` throws for a reply that lacks a field.
 */
export async function sendJson(
  method: string,
  path: string,
  session: Session,
  body: unknown,
  withinMs: number,
  check: (value: unknown) => void = () => undefined,
): Promise<unknown> {
  // the API key is sent with the request, and `..` would lead to another route
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
  return readBody(await call(request, session), (bytes) => {
    const value: unknown = JSON.parse(new TextDecoder().decode(bytes));
    check(value);
    return value;
  });
}

/** Send `body`, if any, as JSON. Return the reply, a map that has the fields `expected`. */
export async function jsonCall<T extends object>(
  method: string,
  path: string,
  session: Session,
  expected: readonly (string & keyof T)[],
  body?: unknown,
): Promise<T> {
  const reply = await sendJson(method, path, session, body, CONTROL_MS, (body) => {
    if (!isMap(body)) throw new TypeError("expected a map");
    const absent = expected.filter((name) => !(name in body));
    if (absent.length) throw new TypeError(`expected ${absent.join(", ")}`);
  });
  return reply as T;
}

/** Delete an object. Throws NotFoundError if it does not exist, unless an attempt without an answer may have deleted it. */
export async function deleteCall(path: string, session: Session): Promise<void> {
  try {
    await jsonCall("DELETE", path, session, []);
  } catch (error) {
    if (!(error instanceof NotFoundError && error.mayHaveRun)) throw error;
  }
}
