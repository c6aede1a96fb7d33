// Files at the server: what jobs and batches read, and what batches write.

import { call, CONTROL_MS, deleteCall, isMap, jsonCall, reading, type Send } from "./calls.js";
import { invalid, unreadable } from "./errors.js";
import type { CallOptions, Session } from "./options.js";
import type { FileObject, FilePage, FilePurpose } from "./types.js";

const UPLOAD_MS = 1_800_000; // as long as the server reads one
const PAGE = 1_000;
const FILE = ["id", "bytes", "filename", "purpose"] as const;

export interface UploadOptions extends CallOptions {
  /** Seconds after which the server removes the file. It is kept without this. */
  expiresAfterS?: number;
}

/** Files of this key. Bodies are those of the server. */
export class Files {
  constructor(private readonly session: Session) {}

  /** Sends a file. A job reads it by its id. A name ends in .jsonl, .csv or .parquet, or the job names the format. */
  async upload(data: Blob, name: string, purpose: FilePurpose = "jobs", { expiresAfterS, ...options }: UploadOptions = {}): Promise<FileObject> {
    if (!(data instanceof Blob)) throw invalid("data: expected a Blob", "data");
    const form = new FormData();
    form.set("purpose", purpose);
    if (expiresAfterS !== undefined) {
      form.set("expires_after[anchor]", "created_at");
      form.set("expires_after[seconds]", String(expiresAfterS));
    }
    form.set("file", data, name);
    const headers = { accept: "application/json" };
    const request: Send = { method: "POST", path: "/v1/files", headers, body: form, withinMs: UPLOAD_MS, once: true };
    return reading(await call(request, this.session.forCall(options)), (bytes) => {
      const value: unknown = JSON.parse(new TextDecoder().decode(bytes));
      if (!isMap(value) || FILE.some((field) => !(field in value))) throw new TypeError(`expected a map with ${FILE.join(", ")}`);
      return value as unknown as FileObject;
    });
  }

  async get(id: string, options?: CallOptions): Promise<FileObject> {
    return jsonCall<FileObject>("GET", path(id), this.session.forCall(options), FILE);
  }

  /** All files of this key, the newest first. Asks for them in pages. */
  async *list(options?: CallOptions): AsyncGenerator<FileObject, void, undefined> {
    const session = this.session.forCall(options);
    for (let after = ""; ; ) {
      const query = new URLSearchParams({ limit: String(PAGE), ...(after ? { after } : {}) });
      const page: FilePage = await jsonCall<FilePage>("GET", `/v1/files?${query}`, session, ["data"]);
      if (!Array.isArray(page.data)) throw unreadable("data: expected a list");
      yield* page.data;
      if (!page.has_more || !page.last_id) return;
      after = page.last_id;
    }
  }

  /** The bytes of a file. */
  async content(id: string, options?: CallOptions): Promise<Uint8Array> {
    const session = this.session.forCall(options);
    const answer = await call({ method: "GET", path: `${path(id)}/content`, withinMs: Math.max(CONTROL_MS, session.withinMs) }, session);
    return answer.body;
  }

  async delete(id: string, options?: CallOptions): Promise<void> {
    await deleteCall(path(id), this.session.forCall(options));
  }
}

function path(id: string): string {
  if (typeof id !== "string" || !/^file-\w+$/.test(id)) throw invalid("file: expected the id of a file", "file");
  return `/v1/files/${id}`;
}
