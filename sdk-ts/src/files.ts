// Files on the server: input of jobs and batches, output of batches.

import { call, CONTROL_MS, deleteCall, isMap, jsonCall, readBody, type Send } from "./calls.js";
import { invalid, unreadable } from "./errors.js";
import type { CallOptions, Session } from "./options.js";
import type { FileObject, FilePage, FilePurpose } from "./types.js";

const UPLOAD_MS = 1_800_000; // the server's limit for an upload
const PAGE_FILES = 1_000;
const FILE = ["id", "bytes", "filename", "purpose"] as const;

export interface UploadOptions extends CallOptions {
  /** Seconds after which the server deletes the file. Default: never. */
  expiresAfterS?: number;
}

/** Files of the API key. Replies have the fields of the server's API. */
export class Files {
  constructor(private readonly session: Session) {}

  /** Upload a file, which a job reads by its id. A job needs its format if `name` ends in no .jsonl, .csv or .parquet. */
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
    return readBody(await call(request, this.session.forCall(options)), (bytes) => {
      const value: unknown = JSON.parse(new TextDecoder().decode(bytes));
      if (!isMap(value) || FILE.some((field) => !(field in value))) throw new TypeError(`expected a map with ${FILE.join(", ")}`);
      return value as unknown as FileObject;
    });
  }

  async get(id: string, options?: CallOptions): Promise<FileObject> {
    return jsonCall<FileObject>("GET", filePath(id), this.session.forCall(options), FILE);
  }

  /** Yield all files of the API key, newest first. They are read in pages. */
  async *list(options?: CallOptions): AsyncGenerator<FileObject, void, undefined> {
    const session = this.session.forCall(options);
    for (let after = ""; ; ) {
      const query = new URLSearchParams({ limit: String(PAGE_FILES), ...(after ? { after } : {}) });
      const page: FilePage = await jsonCall<FilePage>("GET", `/v1/files?${query}`, session, ["data"]);
      if (!Array.isArray(page.data)) throw unreadable("data: expected a list");
      yield* page.data;
      if (!page.has_more || !page.last_id) return;
      if (page.last_id === after) throw unreadable("the pages of files do not end");
      after = page.last_id;
    }
  }

  /** Return the content of a file. */
  async content(id: string, options?: CallOptions): Promise<Uint8Array> {
    const session = this.session.forCall(options);
    const answer = await call({ method: "GET", path: `${filePath(id)}/content`, withinMs: Math.max(CONTROL_MS, session.withinMs) }, session);
    return answer.body;
  }

  async delete(id: string, options?: CallOptions): Promise<void> {
    await deleteCall(filePath(id), this.session.forCall(options));
  }
}

function filePath(id: string): string {
  if (typeof id !== "string" || !/^file-\w+$/.test(id)) throw invalid("file: expected the id of a file", "file");
  return `/v1/files/${id}`;
}
