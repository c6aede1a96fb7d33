// What goes in and what comes out. Bodies and replies are those of the gateway's OpenAPI document (openapi.ts).

import type { Matrix, Numbers } from "./arrays.js";
import type { SIEError } from "./errors.js";
import type { components } from "./openapi.js";
import type { CallOptions } from "./options.js";

type Schemas = components["schemas"];

export type EncodeParams = Schemas["EncodeParams"];
export type ScoreParams = Schemas["ScoreParams"];
export type ExtractParams = Schemas["ExtractParams"];
export type Model = Schemas["ModelInfo"];
export type Health = Schemas["Health"];
export type Worker = Schemas["WorkerInfo"];
export type Pool = Schemas["Pool"];
export type PoolOptions = Omit<Schemas["PoolRequest"], "name" | "gpus" | "ttl_seconds"> & { ttl_seconds?: number };

/** The bytes of a file, or a string of base64 or a data URI; images also at `https:` addresses that the server allows. */
export type File = string | Uint8Array | ArrayBuffer | Blob;
export type Media = File | { data: File; format?: string };

/** One input. `id` and `metadata` come back with the result. `multivector`: of a text that was encoded before. */
export interface Item {
  id?: string;
  text?: string;
  images?: Media | Media[];
  document?: Media;
  audio?: Media;
  video?: Media;
  metadata?: Record<string, unknown>;
  multivector?: Matrix | ArrayLike<number>[];
}

export type Input = string | Item;

export interface EncodeOptions extends CallOptions {
  params?: EncodeParams;
}
export interface ScoreOptions extends CallOptions {
  params?: ScoreParams;
}
export interface ExtractOptions extends CallOptions {
  params?: ExtractParams;
}

/** `body`: what is sent as JSON; undefined: nothing. */
export interface JsonOptions extends CallOptions {
  body?: unknown;
}

/** Of a stream: how long a part that is not full waits for further inputs. 20 */
export interface StreamOptions {
  lingerMs?: number;
}

/** Milliseconds by stage. */
export interface Timing {
  queueMs: number;
  tokenizationMs: number;
  inferenceMs: number;
  postprocessingMs: number;
  totalMs: number;
  [stage: string]: number;
}

/** Tokens of a call, positions of the items that were cut, number of images if there were any. */
export interface Usage {
  promptTokens: number;
  totalTokens: number;
  truncatedItems: number[];
  images?: number;
}

/** Tokens of one item, 0 where it failed, and whether it was cut. */
export interface ItemUsage {
  promptTokens: number;
  totalTokens: number;
  truncated: boolean;
}

/** What every result tells of its request. */
export interface Shared {
  model: string;
  timing: Timing;
  fingerprint: string;
  warnings: string[];
  explain?: Record<string, unknown>[];
  requestId: string;
}

/** The results of a list, in its order. `usage` is that of the whole call. */
export type Results<T> = T[] & { usage: Usage };

/** What an output is read with. `scale` and `offset` are of quantised ones; a multivector has one for each token. */
export interface Output {
  dtype: string;
  dims: number;
  scale?: number | Numbers;
  offset?: number | Numbers;
  source?: string;
}

/** `error` stands in place of outputs that failed. `outputs` describes each output. `muvera`: what made `dense`. */
export interface EncodeResult extends Shared {
  id?: string;
  metadata?: Record<string, unknown>;
  dense?: Numbers;
  sparse?: { indices: Int32Array; values: Numbers };
  multivector?: Matrix;
  outputs: { dense?: Output; sparse?: Output; multivector?: Output };
  muvera?: Record<string, unknown>;
  usage: ItemUsage;
  error?: SIEError;
}

/** `score` is null where the item failed; `error` tells why. */
export interface ScoreEntry {
  itemId: string;
  score: number | null;
  rank: number;
  metadata?: Record<string, unknown>;
  usage: ItemUsage;
  error?: SIEError;
}

/** One entry per item, best first, failed ones last. `usage`: of the whole call. */
export interface ScoreResult extends Shared {
  queryId: string | null;
  scores: ScoreEntry[];
  usage: Usage;
}

export interface Span {
  text: string;
  label: string;
  score: number;
  /** `start` and `end` count code points, not UTF-16 units; null in what was read from an image. */
  start?: number | null;
  end?: number | null;
  bbox?: number[] | null;
  [name: string]: unknown;
}

/** Lists are empty where nothing was found. */
export interface ExtractResult extends Shared {
  id: string;
  metadata?: Record<string, unknown>;
  entities: Span[];
  relations: Record<string, unknown>[];
  classifications: Record<string, unknown>[];
  objects: Record<string, unknown>[];
  data: Record<string, unknown>;
  usage: ItemUsage;
  error?: SIEError;
}

/** What `watch` gives, each second. `timestamp`: seconds since 1970. */
export interface StatusFrame {
  timestamp: number;
  cluster: Schemas["ClusterInfo"];
  workers: Worker[];
  models: Schemas["ModelSummary"][];
  [name: string]: unknown;
}

export interface ModelFilters {
  task?: "encode" | "score" | "extract";
  output?: string;
  loaded?: boolean;
  /** false leaves profiles out. */
  variants?: boolean;
}

export type JobState =
  | "queued" | "planning" | "running" | "paused" | "finalizing" | "completed" | "failed" | "cancelled" | "expired";

/** What a job reads: a file that was sent, or one object, or all below a path that ends in /. Templates name columns. */
export interface JobInput {
  file?: string;
  url?: string;
  format?: "jsonl" | "csv" | "parquet" | "images";
  id?: string;
  text?: string;
  query?: string;
  document?: string;
  image?: string;
  keep?: string[];
}

/** What a job writes. Without `url` its files are kept with the job. */
export interface JobOutput {
  url?: string;
  format?: "parquet" | "jsonl" | "npy";
  sink?: string;
  collection?: string;
}

/** `params` are those of a request of the operation; `deadline` is in seconds since 1970. */
export interface JobRequest {
  model: string;
  input: JobInput;
  output?: JobOutput;
  operation?: "encode" | "score" | "extract";
  params?: EncodeParams | ScoreParams | ExtractParams;
  name?: string;
  metadata?: Record<string, string>;
  pool?: string;
  machine_profile?: string;
  shard_rows?: number;
  tokens_per_s?: number;
  windows?: string[];
  time_zone?: string;
  deadline?: number;
  expires?: boolean;
  cache?: boolean;
}

/** Rows and shards, null before they are counted. `reused`: answers that were not computed. */
export interface JobCounts {
  rows: number | null;
  done: number;
  failed: number;
  reused: number;
  tokens: number;
  shards: number | null;
  shards_done: number;
  shards_failed: number;
}

/** When a job will be done, by the rate of the last minutes. */
export interface JobForecast {
  done_at: number;
  plus_minus_s: number;
  rows_per_s: number;
  workers: number;
  workers_needed: number | null;
}

export interface JobError {
  code: string;
  message: string;
  param?: string;
}

/** Times are seconds since 1970. `trouble`: what it waits for, while it tries again by itself. */
export interface Job {
  id: string;
  object: "job";
  state: JobState;
  name: string;
  created_at: number;
  updated_at: number;
  started_at: number | null;
  ended_at: number | null;
  model: string;
  operation: string;
  counts: JobCounts;
  errors: Record<string, number>;
  error: JobError | null;
  trouble: JobError | null;
  broken: string[];
  fingerprint: string;
  output_url: string;
  owner: string;
  forecast: JobForecast | null;
  request: JobRequest;
}

/** A file of a job's output. `source`: the part of the input whose rows it answers. */
export interface JobPart {
  name: string;
  rows: number;
  failed: number;
  bytes: number;
  sha256: string;
  source: string;
}

export interface JobManifest {
  job: string;
  state: string;
  url: string;
  format: string;
  model: string;
  fingerprint: string;
  rows: number;
  failed: number;
  parts: JobPart[];
  broken: string[];
  next: number | null;
}
