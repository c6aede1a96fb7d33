// Types of arguments and results. The bodies of requests and replies are from the gateway's OpenAPI document (openapi.ts).

import type { Matrix, Numbers } from "./arrays.js";
import type { SIEError } from "./errors.js";
import type { components } from "./openapi.js";
import type { CallOptions } from "./options.js";

type Schemas = components["schemas"];

export type EncodeParams = Schemas["EncodeParams"];
export type ScoreParams = Schemas["ScoreParams"];
export type ExtractParams = Schemas["ExtractParams"];
export type RedactParams = Schemas["RedactParams"];
export type RedactedSpan = Schemas["RedactedSpan"];
/** Map for `restore`, which undoes a redaction. It has all values that were replaced. */
export type RestoreMap = Schemas["RedactionMap"];
export type Model = Schemas["ModelInfo"];
export type Health = Schemas["Health"];
export type Worker = Schemas["WorkerInfo"];
export type Pool = Schemas["Pool"];
export type PoolOptions = Omit<Schemas["PoolRequest"], "name" | "gpus" | "ttl_seconds"> & { ttl_seconds?: number };

/** Bytes of a file, or a string: base64, a data URI, or for images an `https:` URL that the server allows. */
export type File = string | Uint8Array | ArrayBuffer | Blob;
export type Media = File | { data: File; format?: string };

/** Input of a call. The result has its `id` and `metadata`. `multivector`: vectors of a text that was encoded before. */
export interface Item {
  id?: string;
  text?: string;
  images?: Media | Media[];
  document?: Media;
  audio?: Media;
  video?: Media;
  metadata?: Record<string, unknown>;
  multivector?: Matrix | ArrayLike<number>[];
  /** Parts of the text that get their own vectors: spans in code points (positions in `Array.from(text)`), or a rule. */
  chunks?: [number, number][] | ChunkRule;
  /** True, the default: chunks are pooled from one pass over the text. False: each is encoded alone. */
  context?: boolean;
}

/** Rule for chunks. A chunk has at most `max_tokens`, and ends at a `boundary` if it then has at least `min_tokens`. */
export type ChunkRule = Schemas["ChunkRule"];

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
/** Options of `extract` with a schema. `S`: type of the schema, from which the type of the values is inferred. */
export interface SchemaOptions<S extends Schema> extends ExtractOptions {
  schema: S;
}
export interface RedactOptions extends CallOptions {
  params?: RedactParams;
}

export type JSONSchema = Readonly<Record<string, unknown>>;

/** Schema of a library that follows standardschema.dev and gives a JSON Schema, such as zod 4.2 and ArkType 2.1. */
export interface StandardSchema<T = unknown> {
  readonly "~standard": {
    readonly types?: { readonly input: unknown; readonly output: T } | undefined;
    readonly validate: (value: unknown) => Validated<T> | Promise<Validated<T>>;
    readonly jsonSchema: { readonly input: (options: { target: "draft-2020-12" }) => Record<string, unknown> };
  };
}
interface Validated<T> {
  readonly value?: T;
  readonly issues?: readonly { readonly message: string; readonly path?: readonly unknown[] | undefined }[] | undefined;
}

export type Schema = JSONSchema | StandardSchema;

/** Type of the values of a schema. In a JSON Schema, `type`, `enum`, `const`, `anyOf`, `oneOf` and `required` give it. */
export type Values<S> = S extends StandardSchema<infer T> ? T : JSONValue<S>;

type JSONValue<S> = S extends { const: infer Only } ? Only
  : S extends { enum: readonly (infer Choice)[] } ? Choice
  : S extends { anyOf: readonly (infer Part)[] } | { oneOf: readonly (infer Part)[] } ? JSONPart<Part>
  : S extends { type: readonly (infer Name)[] } ? Typed<Name, S>
  : S extends { type: infer Name } ? Typed<Name, S>
  : unknown;
type JSONPart<S> = S extends unknown ? JSONValue<S> : never;
type Typed<Name, S> = Name extends "string" ? string
  : Name extends "number" | "integer" ? number
  : Name extends "boolean" ? boolean
  : Name extends "null" ? null
  : Name extends "array" ? (S extends { items: infer Part } ? JSONValue<Part>[] : unknown[])
  : Name extends "object" ? (S extends { properties: infer Parts } ? Properties<Parts, S> : Record<string, unknown>)
  : unknown;
type Properties<Parts, S> = Flat<
  { -readonly [Name in keyof Parts as Name extends Required<S> ? Name : never]: JSONValue<Parts[Name]> } & {
    -readonly [Name in keyof Parts as Name extends Required<S> ? never : Name]?: JSONValue<Parts[Name]>;
  }
>;
type Required<S> = S extends { required: readonly (infer Name)[] } ? Name : never;
type Flat<T> = { [Name in keyof T]: T[Name] };

/** Options of `json`. `body`: sent as JSON; undefined: no body. */
export interface JsonOptions extends CallOptions {
  body?: unknown;
}

/** Options of a stream. `lingerMs`: time after which a part that is not full is sent. Default: 20 */
export interface StreamOptions {
  lingerMs?: number;
}

/** Durations of the stages of a request, in milliseconds. */
export interface Timing {
  queueMs: number;
  tokenizationMs: number;
  inferenceMs: number;
  postprocessingMs: number;
  totalMs: number;
  [stage: string]: number;
}

/**
 * Tokens of a call, positions of its truncated items, and number of its images, if it has any. `cachedItems`,
 * `cachedTokens`: number of items with cached answers, and number of their tokens; absent if there are none.
 */
export interface Usage {
  promptTokens: number;
  totalTokens: number;
  truncatedItems: number[];
  images?: number;
  cachedItems?: number;
  cachedTokens?: number;
}

/** Tokens of one item; 0 if it failed. */
export interface ItemUsage {
  promptTokens: number;
  totalTokens: number;
  truncated: boolean;
}

/** Fields that all results of a request share. */
export interface Shared {
  model: string;
  timing: Timing;
  fingerprint: string;
  warnings: string[];
  explain?: Record<string, unknown>[];
  requestId: string;
}

/** Results of a list, in its order. `usage`: tokens of the whole call. */
export type Results<T> = T[] & { usage: Usage };

/** Description of an output. `scale` and `offset` convert quantised values; a multivector has one of each for each token. */
export interface Output {
  dtype: string;
  dims: number;
  scale?: number | Numbers;
  offset?: number | Numbers;
  source?: string;
}

/** Vectors of one chunk of a text. `start` and `end` count code points. `tokens`: number of tokens of the chunk's text. */
export interface ChunkResult extends Outputs {
  start: number;
  end: number;
  tokens: number;
}

/** Outputs of an item or of a chunk. `outputs` describes each of them. */
export interface Outputs {
  dense?: Numbers;
  sparse?: { indices: Int32Array; values: Numbers };
  multivector?: Matrix;
  outputs: { dense?: Output; sparse?: Output; multivector?: Output };
}

/**
 * Result of `encode`. An item that failed has `error` in place of outputs. An item with chunks has `chunks` in place of
 * outputs. `muvera`: parameters of the encoding that made `dense`.
 */
export interface EncodeResult extends Shared, Outputs {
  id?: string;
  metadata?: Record<string, unknown>;
  chunks?: ChunkResult[];
  muvera?: Record<string, unknown>;
  usage: ItemUsage;
  error?: SIEError;
}

/** Score of one item. If the item failed, `score` is null and `error` says why. */
export interface ScoreEntry {
  itemId: string;
  score: number | null;
  rank: number;
  metadata?: Record<string, unknown>;
  usage: ItemUsage;
  error?: SIEError;
}

/** Result of `score`: one entry for each item, best first, failed items last. `usage`: tokens of the whole call. */
export interface ScoreResult extends Shared {
  queryId: string | null;
  scores: ScoreEntry[];
  usage: Usage;
}

/** Span of a text, or a region of an image, with its label. */
export interface Span {
  text: string;
  label: string;
  score: number;
  /** `start` and `end` count code points, not UTF-16 units. Null for a text that was read from an image. */
  start?: number | null;
  end?: number | null;
  bbox?: number[] | null;
  [name: string]: unknown;
}

/** Result of `extract`. A list is empty if nothing was found. */
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

/** Result of `extract` with a schema. An item that failed or lacks a required value has `error` in place of `data`. */
export type SchemaResult<T> = Omit<ExtractResult, "data" | "error"> &
  ({ data: T; error?: undefined } | { data?: undefined; error: SIEError });

/**
 * Result of `redact`. An item that failed has `error` in place of `text`, `spans` and `map`. Offsets count code points, or
 * the units of `params.offsets`.
 */
export interface RedactResult extends Shared {
  id: string;
  metadata?: Record<string, unknown>;
  text?: string;
  spans?: RedactedSpan[];
  map?: RestoreMap;
  usage: ItemUsage;
  error?: SIEError;
}

/** State of workers and models, which `watch` yields each second. `timestamp`: seconds since 1970. */
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
  /** False: without profiles. */
  variants?: boolean;
}

export type Job = Schemas["JobInfo"];
export type JobState = Job["state"];
export type JobInput = Schemas["JobInput"];
export type JobOutput = Schemas["JobOutput"];
export type JobRequest = Schemas["JobRequest"];
export type JobCounts = Schemas["JobCounts"];
export type JobForecast = Schemas["Forecast"];
export type JobError = Schemas["JobError"];
export type JobPage = Schemas["JobPage"];
export type JobPart = Schemas["JobPart"];
export type JobManifest = Schemas["JobManifest"];
export type JobRow = Schemas["JobRow"];
export type FileObject = Schemas["FileObject"];
export type FilePage = Schemas["FilePage"];
export type FilePurpose = Schemas["FileUpload"]["purpose"];
export type Batch = Schemas["BatchObject"];
export type BatchPage = Schemas["BatchPage"];
export type BatchRequest = Schemas["BatchRequest"];
