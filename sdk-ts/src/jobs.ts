// Jobs, which process whole files on the server, and their output files.

import { call, deleteCall, isMap, jsonCall, readBody, sleep } from "./calls.js";
import { ContentConflictError, invalid, unreadable } from "./errors.js";
import type { CallOptions, Session } from "./options.js";
import type { Job, JobManifest, JobPage, JobPart, JobRequest, JobRow, JobState } from "./types.js";

const FIRST_PAUSE_MS = 500; // first pause between two requests for the state of a job
const MAX_PAUSE_MS = 5_000;
const PAGE_JOBS = 100;
const JOB = ["id", "state", "counts", "request"] as const;
const FINAL_STATES: readonly string[] = ["completed", "failed", "cancelled", "expired"];

export interface WaitOptions extends CallOptions {
  /** Callback with the job, each time its state was read: every few seconds. */
  onLook?: (job: Job) => void;
}

export interface SubmitOptions extends CallOptions {
  /** A second request with the same key creates no second job. */
  idempotencyKey?: string;
}

export interface RowsOptions extends CallOptions {
  /** Default: 20 */
  limit?: number;
  /** True: only rows with an error. */
  failed?: boolean;
}

/** Jobs, which process whole files on the server. Requests and replies have the fields of the server's API. */
export class Jobs {
  constructor(private readonly session: Session) {}

  /** Create a job that processes an uploaded file, or the files at a URL that the server is allowed to read. */
  async submit(request: JobRequest, { idempotencyKey, ...options }: SubmitOptions = {}): Promise<Job> {
    return createJob("/v1/jobs", this.session.forCall(options), idempotencyKey ?? randomKey(), request);
  }

  async get(id: string, options?: CallOptions): Promise<Job> {
    return jsonCall<Job>("GET", jobPath(id), this.session.forCall(options), JOB);
  }

  /** Yield all jobs, or only those in `state`, newest first. They are read in pages. */
  async *list(state?: JobState, options?: CallOptions): AsyncGenerator<Job, void, undefined> {
    const session = this.session.forCall(options);
    let after: string | null = null;
    do {
      const query = new URLSearchParams({ limit: String(PAGE_JOBS) });
      if (state !== undefined) query.set("state", state);
      if (after !== null) query.set("after", after);
      const page: JobPage = await jsonCall("GET", `/v1/jobs?${query}`, session, ["data"]);
      if (!Array.isArray(page.data)) throw unreadable("data: expected a list");
      yield* page.data;
      const next: string | null = page.next ?? null;
      if (next !== null && next === after) throw unreadable("the pages of jobs do not end");
      after = next;
    } while (after !== null);
  }

  /** Pause a job. Running parts of the input are stopped and run again after `resume`; finished parts stay. */
  async pause(id: string, options?: CallOptions): Promise<Job> {
    return jsonCall<Job>("POST", `${jobPath(id)}/pause`, this.session.forCall(options), JOB);
  }

  /** Continue a job after a pause. */
  async resume(id: string, options?: CallOptions): Promise<Job> {
    return jsonCall<Job>("POST", `${jobPath(id)}/resume`, this.session.forCall(options), JOB);
  }

  /** Cancel a job. Output that it has written is kept. */
  async cancel(id: string, options?: CallOptions): Promise<Job> {
    try {
      return await jsonCall<Job>("POST", `${jobPath(id)}/cancel`, this.session.forCall(options), JOB);
    } catch (error) {
      if (!(error instanceof ContentConflictError && error.mayHaveRun)) throw error;
      const job = await this.get(id, options); // an earlier attempt without an answer may have cancelled it
      if (job.state !== "cancelled") throw error;
      return job;
    }
  }

  /** Create a new job that processes the rows that failed. */
  async retry(id: string, options?: CallOptions): Promise<Job> {
    return createJob(`${jobPath(id)}/retry`, this.session.forCall(options), randomKey());
  }

  /** Delete a job that has ended, and its output. */
  async delete(id: string, options?: CallOptions): Promise<void> {
    await deleteCall(jobPath(id), this.session.forCall(options));
  }

  /** Wait until a job has ended, and return it in whatever state. */
  async wait(id: string, { onLook, ...options }: WaitOptions = {}): Promise<Job> {
    const session = this.session.forCall(options);
    for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs = Math.min(MAX_PAUSE_MS, pauseMs * 1.5)) {
      const job = await jsonCall<Job>("GET", jobPath(id), session, JOB);
      onLook?.(job);
      if (FINAL_STATES.includes(job.state)) return job;
      await sleep(pauseMs, session.signal);
    }
  }

  /** Return the manifest of a job's output, with the entries of all its pages. */
  async manifest(id: string, options?: CallOptions): Promise<JobManifest> {
    const session = this.session.forCall(options);
    const parts: JobPart[] = [];
    for (let after: number | null = null; ; ) {
      const query: string = after === null ? "" : `?after=${after}`;
      const page: JobManifest = await jsonCall("GET", `${jobPath(id)}/manifest${query}`, session, ["job", "parts"]);
      if (!Array.isArray(page.parts)) throw unreadable("parts: expected a list");
      parts.push(...page.parts);
      const next: number | null = page.next ?? null;
      if (next === null) return { ...page, parts, next };
      if (after !== null && next <= after) throw unreadable("the pages of the manifest do not end");
      after = next;
    }
  }

  /** Return up to `limit` processed rows, without their values. */
  async rows(id: string, { limit = 20, failed = false, ...options }: RowsOptions = {}): Promise<JobRow[]> {
    const query = new URLSearchParams({ limit: String(limit), failed: String(failed) });
    const { rows } = await jsonCall<{ rows: JobRow[] }>("GET", `${jobPath(id)}/rows?${query}`, this.session.forCall(options), ["rows"]);
    if (!Array.isArray(rows)) throw unreadable("rows: expected a list");
    return rows;
  }

  /** Return the content of an output file. Its digest is checked where `crypto.subtle` exists: a page needs https. */
  async part(id: string, part: JobPart, options?: CallOptions): Promise<Uint8Array> {
    if (!isMap(part) || typeof part.name !== "string") throw invalid("part: expected a part of a manifest", "part");
    const session = this.session.forCall(options);
    const query = new URLSearchParams({ name: part.name });
    const answer = await call({ method: "GET", path: `${jobPath(id)}/part?${query}`, withinMs: session.withinMs }, session);
    const digest = await sha256(answer.body);
    return readBody(answer, (body) => {
      if (body.length !== part.bytes || (digest !== undefined && digest !== part.sha256)) {
        throw new TypeError(`${part.name}: the content (${body.length} bytes) differs from the manifest`);
      }
      return body;
    });
  }
}

function jobPath(id: string): string {
  if (typeof id !== "string" || !/^[A-Za-z0-9][\w-]*$/.test(id)) throw invalid("job: expected the id of a job", "job");
  return `/v1/jobs/${id}`;
}

/** Send a POST with an idempotency key: a repetition after a broken connection creates no second job. */
function createJob(path: string, session: Session, idempotencyKey: string, body?: unknown): Promise<Job> {
  const headers = { ...session.options.headers, "idempotency-key": idempotencyKey };
  return jsonCall<Job>("POST", path, session.forCall({ headers }), JOB, body);
}

// undefined in Node 18 without a flag; a page has `subtle` only with https
const webCrypto = (globalThis as { crypto?: Crypto & { subtle?: SubtleCrypto } }).crypto;

/** Return a random idempotency key. It is no secret, so Math.random is enough where the runtime has no `crypto`. */
function randomKey(): string {
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
