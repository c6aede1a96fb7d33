// How calls are sent, and how long they wait.

import { invalid } from "./errors.js";
import { VERSION } from "./version.js";

/** How far a call has come. While it waits, `cause` is a code of the server or `connection`. */
export interface Progress {
  done: number;
  total: number;
  cause?: string;
  remainingMs?: number;
}

/** How a call is sent. Each may be given to the client too, for all of its calls. */
export interface CallOptions {
  /** Ends the call with SIEAbortError. */
  signal?: AbortSignal;
  /** Deadline of each request at the server. */
  timeoutMs?: number;
  /** false: nothing is waited for. */
  waitForCapacity?: boolean;
  /** How long to wait for capacity since the last answer: workers that start, models that load, a full queue. 900,000 */
  provisionTimeoutMs?: number;
  /** How long to wait for a server that cannot be reached. 120,000; 5,000 for one that was never there. */
  connectionTimeoutMs?: number;
  /** Machine profile. */
  gpu?: string;
  /** Name of a pool. */
  pool?: string;
  priority?: "interactive" | "bulk";
  /** Results say what the request waited for. */
  explain?: boolean;
  /** Parameters that the model does not know are errors, not warnings. */
  strict?: boolean;
  /** Further headers, such as X-Request-ID and traceparent. */
  headers?: Record<string, string>;
  /** Estimated tokens of one request of a long list. 16,384 */
  partTokens?: number;
  /** Requests of one call that are in flight at a time. 8 */
  concurrency?: number;
  /** Called after each part of a list, and at each wait. */
  onProgress?: (progress: Progress) => void;
}

type Fetch = (input: string, init: RequestInit) => Promise<Response>;

export interface ClientOptions extends Omit<CallOptions, "signal"> {
  /** Address of the server, with the prefix of a proxy if there is one. A page may give a path of its own origin. */
  baseUrl: string | URL;
  /** Sent as a bearer token. */
  apiKey?: string;
  /** In place of the global `fetch`. */
  fetch?: Fetch;
  /** A class of websockets for `watch`, in place of the global one: `WebSocket` of the package `ws` in Node before 22. */
  webSocket?: WebSocketClass;
}

/** What `watch` needs of a websocket. */
export interface WebSocketLike {
  onopen: ((event: never) => void) | null;
  onmessage: ((event: never) => void) | null;
  onerror: ((event: never) => void) | null;
  onclose: ((event: never) => void) | null;
  close(): void;
}
// the arguments of such classes differ, so no type fits all of them
export type WebSocketClass = new (...args: any[]) => WebSocketLike;

const SERVER_DEADLINE_MS = 120_000;
const GRACE_MS = 30_000; // above the server's own deadline, so that its answer wins
const LEAST: Readonly<Record<string, number>> = {
  timeoutMs: 1,
  provisionTimeoutMs: 0,
  connectionTimeoutMs: 0,
  partTokens: 1,
  concurrency: 1,
};

/** What all requests of a call share. */
export class Session {
  readonly baseUrl: string;
  readonly fetch: Fetch;
  readonly webSocket: WebSocketClass | undefined;
  /** Whether the server of this client has ever answered; one object for all of its calls. */
  readonly seen: { answer: boolean };

  private constructor(
    readonly options: CallOptions,
    private readonly client: ClientOptions,
    shared?: Session,
  ) {
    this.baseUrl = shared?.baseUrl ?? address(client.baseUrl);
    this.fetch = client.fetch ?? ((input, init) => globalThis.fetch(input, init));
    this.webSocket = client.webSocket;
    this.seen = shared?.seen ?? { answer: false };
    for (const [name, least] of Object.entries(LEAST)) {
      const value = (options as Record<string, unknown>)[name];
      if (value !== undefined && !(typeof value === "number" && Number.isFinite(value) && value >= least)) {
        throw invalid(`${name}: expected a number of at least ${least}, got ${String(value)}`, name);
      }
    }
    for (const [name, value] of Object.entries(this.headers())) {
      if (typeof value !== "string" || !/^[\x20-\x7e]*$/.test(value) || !/^[!#$%&'*+\-.^_`|~\w]+$/.test(name)) {
        throw invalid(`header ${name}: expected printable ASCII in one line`, name);
      }
    }
  }

  static of(options: ClientOptions): Session {
    return new Session(options, options);
  }

  /** The session of one call. What is undefined is as the client has it. */
  forCall(options: CallOptions = {}): Session {
    const own = Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));
    return new Session({ ...this.options, ...own }, this.client, this);
  }

  get signal(): AbortSignal | undefined {
    return this.options.signal;
  }

  get apiKey(): string {
    return (this.client.apiKey ?? "").trim();
  }

  /** How long an answer may take. */
  get withinMs(): number {
    return Math.max(SERVER_DEADLINE_MS, this.options.timeoutMs ?? 0) + GRACE_MS;
  }

  /** Of every request, but for the format of its body. */
  headers(): Record<string, string> {
    const { timeoutMs, gpu, pool, priority, explain, strict, headers } = this.options;
    const named: Record<string, string | undefined> = {
      authorization: this.apiKey ? `Bearer ${this.apiKey}` : undefined,
      "x-sie-timeout-ms": timeoutMs === undefined ? undefined : String(Math.max(1, Math.min(600_000, Math.round(timeoutMs)))),
      "x-sie-machine-profile": gpu,
      "x-sie-pool": pool,
      "x-sie-priority": priority,
      "x-sie-explain": explain ? "1" : undefined,
      "x-sie-strict": strict ? "true" : undefined,
    };
    const fields: Record<string, string> = { "x-sie-client-version": VERSION };
    for (const [name, value] of Object.entries(named)) if (value) fields[name] = value;
    for (const [name, value] of Object.entries(headers ?? {})) fields[name.toLowerCase()] = value;
    return fields;
  }
}

/** The address of a server, without a final slash. */
function address(baseUrl: string | URL): string {
  const here = (globalThis as { location?: { href?: string } }).location?.href;
  let url: URL;
  try {
    url = new URL(String(baseUrl), here);
  } catch (error) {
    throw invalid("baseUrl: expected an address such as http://127.0.0.1:8080", "baseUrl", error);
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") {
    throw invalid("baseUrl: expected an address that begins with http:// or https://", "baseUrl");
  }
  // fetch refuses such addresses, with an error that shows the password
  if (url.username || url.password) throw invalid("baseUrl: a user or a password in it is not sent; use apiKey", "baseUrl");
  return url.origin + url.pathname.replace(/\/+$/, "");
}

// a proxy may decode percent signs once more, and take a backslash for a slash
const UNFIT = /[%\\?#\u0000-\u001f\u007f-\u009f]|\p{Cs}/u;

/** A name escaped for a path. Throws for a name that may lead to another route. */
export function quoted(name: string, kind: string): string {
  if (typeof name !== "string" || UNFIT.test(name) || name.split("/").some((part) => ["", ".", ".."].includes(part))) {
    const expected = "a name without empty parts, . and .. between slashes, and without %, \\, ?, # and control characters";
    throw invalid(`${kind}: expected ${expected}, got ${JSON.stringify(name)?.slice(0, 80)}`, kind);
  }
  return encodeURIComponent(name).replace(/%(2F|3A|40)/g, decodeURIComponent);
}

/** Whether a path with its query leads to the route that it shows: decoded, it is a name behind a slash. */
export function isRoute(path: string): boolean {
  const [route = ""] = path.split("?");
  try {
    return route.startsWith("/") && quoted(decodeURIComponent(route.slice(1)), "path") !== "";
  } catch {
    return false;
  }
}
