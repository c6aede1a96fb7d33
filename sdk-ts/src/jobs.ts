// Work on whole files: jobs, which run at the server, and the files that they write.

import { call, deleteCall, isMap, jsonCall, reading, sleep } from "./calls.js";
import { ContentConflictError, invalid, unreadable } from "./errors.js";
import type { CallOptions, Session } from "./options.js";
import type { Job, JobManifest, JobPage, JobPart, JobRequest, JobRow, JobState } from "./types.js";

const FIRST_PAUSE_MS = 500; // between looks at a job that is waited for
const MAX_PAUSE_MS = 5_000;
const PAGE = 100;
const JOB = ["id", "state", "counts", "request"] as const;
const ENDED: readonly string[] = ["completed", "failed", "cancelled", "expired"];

export interface WaitOptions extends CallOptions {
  /** Called with the job after each look, one each few seconds. */
  onLook?: (job: Job) => void;
}

export interface SubmitOptions extends CallOptions {
  /** The same key gives the same job. */
  idempotencyKey?: string;
}

export interface RowsOptions extends CallOptions {
  /** 20 */
  limit?: number;
  failed?: boolean;
}

/** Work on whole files. Bodies are those of the server. */
export class Jobs {
  constructor(private readonly session: Session) {}

  /** Begins a job over a file that was sent, or over an address that the server allows. */
  async submit(request: JobRequest, { idempotencyKey, ...options }: SubmitOptions = {}): Promise<Job> {
    return post("/v1/jobs", this.session.forCall(options), idempotencyKey ?? key(), request);
  }

  async get(id: string, options?: CallOptions): Promise<Job> {
    return jsonCall<Job>("GET", path(id), this.session.forCall(options), JOB);
  }

  /** All jobs, the newest first, or those in a state. Asks for them in pages. */
  async *list(state?: JobState, options?: CallOptions): AsyncGenerator<Job, void, undefined> {
    const session = this.session.forCall(options);
    let after: string | null = null;
    do {
      const query = new URLSearchParams({ limit: String(PAGE) });
      if (state !== undefined) query.set("state", state);
      if (after !== null) query.set("after", after);
      const page: JobPage = await jsonCall("GET", `/v1/jobs?${query}`, session, ["data"]);
      if (!Array.isArray(page.data)) throw unreadable("data: expected a list");
      yield* page.data;
      after = page.next ?? null;
    } while (after !== null);
  }

  /** What runs is finished, and nothing more begins. */
  async pause(id: string, options?: CallOptions): Promise<Job> {
    return jsonCall<Job>("POST", `${path(id)}/pause`, this.session.forCall(options), JOB);
  }

  /** Goes on after a pause. */
  async resume(id: string, options?: CallOptions): Promise<Job> {
    return jsonCall<Job>("POST", `${path(id)}/resume`, this.session.forCall(options), JOB);
  }

  /** Ends a job for ever. What it has written stays. */
  async cancel(id: string, options?: CallOptions): Promise<Job> {
    try {
      return await jsonCall<Job>("POST", `${path(id)}/cancel`, this.session.forCall(options), JOB);
    } catch (error) {
      if (!(error instanceof ContentConflictError && error.mayHaveRun)) throw error;
      const job = await this.get(id, options); // an attempt without an answer may have cancelled it
      if (job.state !== "cancelled") throw error;
      return job;
    }
  }

  /** Begins another job, over the rows that failed. */
  async retry(id: string, options?: CallOptions): Promise<Job> {
    return post(`${path(id)}/retry`, this.session.forCall(options), key());
  }

  /** Forgets a job that has ended, with its output. */
  async delete(id: string, options?: CallOptions): Promise<void> {
    await deleteCall(path(id), this.session.forCall(options));
  }

  /** The job once it has ended, however that is. */
  async wait(id: string, { onLook, ...options }: WaitOptions = {}): Promise<Job> {
    const session = this.session.forCall(options);
    for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs = Math.min(MAX_PAUSE_MS, pauseMs * 1.5)) {
      const job = await jsonCall<Job>("GET", path(id), session, JOB);
      onLook?.(job);
      if (ENDED.includes(job.state)) return job;
      await sleep(pauseMs, session.signal);
    }
  }

  /** The files of a job's output, all of them. */
  async manifest(id: string, options?: CallOptions): Promise<JobManifest> {
    const session = this.session.forCall(options);
    const parts: JobPart[] = [];
    for (let after: number | null = null; ; ) {
      const query: string = after === null ? "" : `?after=${after}`;
      const page: JobManifest = await jsonCall("GET", `${path(id)}/manifest${query}`, session, ["job", "parts"]);
      if (!Array.isArray(page.parts)) throw unreadable("parts: expected a list");
      parts.push(...page.parts);
      const next: number | null = page.next ?? null;
      if (next === null) return { ...page, parts, next };
      if (after !== null && next <= after) throw unreadable("the pages of the manifest do not end");
      after = next;
    }
  }

  /** Some rows that were answered, without their values. `failed`: only rows with an error. */
  async rows(id: string, { limit = 20, failed = false, ...options }: RowsOptions = {}): Promise<JobRow[]> {
    const query = new URLSearchParams({ limit: String(limit), failed: String(failed) });
    const { rows } = await jsonCall<{ rows: JobRow[] }>("GET", `${path(id)}/rows?${query}`, this.session.forCall(options), ["rows"]);
    if (!Array.isArray(rows)) throw unreadable("rows: expected a list");
    return rows;
  }

  /** The bytes of a part, checked by its digest where the platform can (a page needs https for that). */
  async part(id: string, part: JobPart, options?: CallOptions): Promise<Uint8Array> {
    if (!isMap(part) || typeof part.name !== "string") throw invalid("part: expected one of a manifest", "part");
    const session = this.session.forCall(options);
    const query = new URLSearchParams({ name: part.name });
    const answer = await call({ method: "GET", path: `${path(id)}/part?${query}`, withinMs: session.withinMs }, session);
    const digest = await sha256(answer.body);
    return reading(answer, (body) => {
      if (body.length !== part.bytes || (digest !== undefined && digest !== part.sha256)) {
        throw new TypeError(`${part.name}: the ${body.length} bytes that came are not those of the manifest`);
      }
      return body;
    });
  }
}

function path(id: string): string {
  if (typeof id !== "string" || !/^[A-Za-z0-9][\w-]*$/.test(id)) throw invalid("job: expected the id of a job", "job");
  return `/v1/jobs/${id}`;
}

/** With a key, since it may be sent again: two answers would be two jobs. */
function post(path_: string, session: Session, idempotencyKey: string, body?: unknown): Promise<Job> {
  const headers = { ...session.options.headers, "idempotency-key": idempotencyKey };
  return jsonCall<Job>("POST", path_, session.forCall({ headers }), JOB, body);
}

// Node 18 has it only by a flag, and a page its digests only behind https
const webCrypto = (globalThis as { crypto?: Crypto & { subtle?: SubtleCrypto } }).crypto;

/** It need only be another one each time. */
function key(): string {
  const bytes = Uint8Array.from({ length: 16 }, () => Math.floor(Math.random() * 256));
  return hex(webCrypto ? webCrypto.getRandomValues(bytes) : bytes);
}

async function sha256(body: Uint8Array): Promise<string | undefined> {
  if (webCrypto?.subtle === undefined) return undefined;
  return hex(new Uint8Array(await webCrypto.subtle.digest("SHA-256", body as Uint8Array<ArrayBuffer>)));
}

function hex(bytes: Uint8Array): string {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
