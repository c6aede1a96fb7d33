// Options of clients and of calls.

import { invalid } from "./errors.js";
import { VERSION } from "./version.js";

/** Progress of a call. While it waits, `cause` is an error code of the server, or `connection`. */
export interface Progress {
  done: number;
  total: number;
  cause?: string;
  remainingMs?: number;
}

/** Options of a call. As options of the client, all but `signal` hold for all of its calls. */
export interface CallOptions {
  /** Signal that ends the call with SIEAbortError. */
  signal?: AbortSignal;
  /** Deadline of each request on the server. */
  timeoutMs?: number;
  /** False: the call waits neither for capacity nor for a connection. */
  waitForCapacity?: boolean;
  /** Time to wait for capacity since the last answer: a starting worker, a loading model, a full queue. Default: 900,000 */
  provisionTimeoutMs?: number;
  /** Time to wait for a server that cannot be reached. Default: 120,000, or 5,000 if probably no server runs there. */
  connectionTimeoutMs?: number;
  /** Machine profile. */
  gpu?: string;
  /** Name of a pool. */
  pool?: string;
  priority?: "interactive" | "bulk";
  /** True: `explain` of the results says what the request waited for. */
  explain?: boolean;
  /** True: parameters that the model does not know are errors, not warnings. */
  strict?: boolean;
  /** Additional headers, such as X-Request-ID and traceparent. */
  headers?: Record<string, string>;
  /** Estimated tokens of one request of a long list. Default: 16,384 */
  partTokens?: number;
  /** Requests of one call that are in flight at a time. Default: 8 */
  concurrency?: number;
  /** Callback after each part of a list, and before each wait. */
  onProgress?: (progress: Progress) => void;
}

type Fetch = (input: string, init: RequestInit) => Promise<Response>;

export interface ClientOptions extends Omit<CallOptions, "signal"> {
  /** URL of the server, with the prefix of a proxy if there is one. In a page it may be a path of the page's origin. */
  baseUrl: string | URL;
  /** API key, sent as a bearer token. */
  apiKey?: string;
  /** Function in place of the global `fetch`. */
  fetch?: Fetch;
  /** WebSocket class for `watch` in place of the global one. Node before 22 needs `WebSocket` of the package `ws`. */
  webSocket?: WebSocketClass;
}

/** Members of a WebSocket that `watch` uses. */
export interface WebSocketLike {
  onopen: ((event: never) => void) | null;
  onmessage: ((event: never) => void) | null;
  onerror: ((event: never) => void) | null;
  onclose: ((event: never) => void) | null;
  close(): void;
}
// the constructors of WebSocket classes differ, so no type of the arguments fits all of them
export type WebSocketClass = new (...args: any[]) => WebSocketLike;

const SERVER_DEADLINE_MS = 120_000;
const GRACE_MS = 30_000; // time after the server's deadline, so that the server's error arrives first
const MINIMA: Readonly<Record<string, number>> = {
  timeoutMs: 1,
  provisionTimeoutMs: 0,
  connectionTimeoutMs: 0,
  partTokens: 1,
  concurrency: 1,
};

/** Options and shared state of a client or of a call. Throws InvalidInputError for an invalid option. */
export class Session {
  readonly baseUrl: string;
  readonly fetch: Fetch;
  readonly webSocket: WebSocketClass | undefined;
  /** State of the server, one object for all calls of a client. */
  readonly server: { hasAnswered: boolean };

  private constructor(
    readonly options: CallOptions,
    private readonly client: ClientOptions,
    shared?: Session,
  ) {
    this.baseUrl = shared?.baseUrl ?? parseBaseUrl(client.baseUrl);
    this.fetch = client.fetch ?? ((input, init) => globalThis.fetch(input, init));
    this.webSocket = client.webSocket;
    this.server = shared?.server ?? { hasAnswered: false };
    for (const [name, minimum] of Object.entries(MINIMA)) {
      const value = (options as Record<string, unknown>)[name];
      if (value !== undefined && !(typeof value === "number" && Number.isFinite(value) && value >= minimum)) {
        throw invalid(`${name}: expected a number of at least ${minimum}, got ${String(value)}`, name);
      }
    }
    for (const [name, value] of Object.entries(this.headers())) {
      if (typeof value !== "string" || !/^[\x20-\x7e]*$/.test(value) || !/^[!#$%&'*+\-.^_`|~\w]+$/.test(name)) {
        throw invalid(`header ${name}: expected printable ASCII in one line`, name);
      }
    }
  }

  static fromOptions(options: ClientOptions): Session {
    return new Session(options, options);
  }

  /** Return the session of a call. `options` replace those of the client, unless they are undefined. */
  forCall(options: CallOptions = {}): Session {
    const overrides = Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));
    return new Session({ ...this.options, ...overrides }, this.client, this);
  }

  get signal(): AbortSignal | undefined {
    return this.options.signal;
  }

  get apiKey(): string {
    return (this.client.apiKey ?? "").trim();
  }

  /** Return the time after which the client stops waiting for an answer. */
  get withinMs(): number {
    return Math.max(SERVER_DEADLINE_MS, this.options.timeoutMs ?? 0) + GRACE_MS;
  }

  /** Return the headers of every request. Those about the format of the body are added later. */
  headers(): Record<string, string> {
    const { timeoutMs, gpu, pool, priority, explain, strict, headers } = this.options;
    const optional: Record<string, string | undefined> = {
      authorization: this.apiKey ? `Bearer ${this.apiKey}` : undefined,
      "x-sie-timeout-ms": timeoutMs === undefined ? undefined : String(Math.max(1, Math.min(600_000, Math.round(timeoutMs)))),
      "x-sie-machine-profile": gpu,
      "x-sie-pool": pool,
      "x-sie-priority": priority,
      "x-sie-explain": explain ? "1" : undefined,
      "x-sie-strict": strict ? "true" : undefined,
    };
    const fields: Record<string, string> = { "x-sie-client-version": VERSION };
    for (const [name, value] of Object.entries(optional)) if (value) fields[name] = value;
    for (const [name, value] of Object.entries(headers ?? {})) fields[name.toLowerCase()] = value;
    return fields;
  }
}

/** Return the URL of a server, without a slash at the end. Throws InvalidInputError. */
function parseBaseUrl(baseUrl: string | URL): string {
  const pageUrl = (globalThis as { location?: { href?: string } }).location?.href;
  let url: URL;
  try {
    url = new URL(String(baseUrl), pageUrl);
  } catch (error) {
    throw invalid("baseUrl: expected an address such as http://127.0.0.1:8080", "baseUrl", error);
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") {
    throw invalid("baseUrl: expected an address that begins with http:// or https://", "baseUrl");
  }
  // fetch refuses such URLs, with an error that shows the password
  if (url.username || url.password) throw invalid("baseUrl: expected no user and no password; use apiKey", "baseUrl");
  return url.origin + url.pathname.replace(/\/+$/, "");
}

// a proxy may decode a percent sign again, and treat a backslash as a slash
const FORBIDDEN = /[%\\?#\u0000-\u001f\u007f-\u009f]|\p{Cs}/u;

/** Escape a name for a path. Throws InvalidInputError for a name that may lead to another route. */
export function quoteName(name: string, kind: string): string {
  if (typeof name !== "string" || FORBIDDEN.test(name) || name.split("/").some((part) => ["", ".", ".."].includes(part))) {
    const expected = "a name without %, \\, ?, # and control characters, and without a part between slashes that is empty, . or ..";
    throw invalid(`${kind}: expected ${expected}, got ${JSON.stringify(name)?.slice(0, 80)}`, kind);
  }
  return encodeURIComponent(name).replace(/%(2F|3A|40)/g, decodeURIComponent);
}

/** Return true for a path, with or without a query, that leads to the route that it names, also when it is decoded. */
export function isRoute(path: string): boolean {
  const [route = ""] = path.split("?");
  try {
    return route.startsWith("/") && quoteName(decodeURIComponent(route.slice(1)), "path") !== "";
  } catch {
    return false;
  }
}
