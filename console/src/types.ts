/** What the console reads of the gateway's replies. */

export interface Model {
  id: string;
  tasks: ("encode" | "score" | "extract")[];
  inputs: string[];
  outputs: string[];
  dims: Record<string, number>;
  state: string;
  worker_count: number;
  workers?: string[];
  max_sequence_length: number | null;
  profiles?: Record<string, unknown>;
  prompts?: string[];
  revision?: string | null;
  fingerprint?: string | null;
  certificate?: unknown;
  license?: string | null;
  precision?: { served: string[]; reason: string | null };
  engine?: { served: string[]; reason: string | null };
  backend?: string;
  variant_of?: string;
  bundles?: string[];
  score_scale?: string | null;
  last_error?: { message?: string } | null;
  alias?: { targets: { model: string; weight: number }[]; shadow?: { model: string; share: number } };
  downloads?: { worker: string; done_bytes: number; total_bytes: number; bytes_per_s: number }[];
}

export interface Worker {
  name: string;
  pool: string;
  gpu: string;
  gpu_count: number;
  bundle: string;
  device: string;
  healthy: boolean;
  queue_depth: number;
  memory_used_bytes: number;
  memory_total_bytes: number;
  loaded_models: string[];
}

export interface Cluster {
  version: string;
  cluster: { worker_count: number; gpu_count: number; models_loaded: number; total_qps: number };
  counts: { workers: number; models: number; in_flight: number; dead_letters: number };
  workers: Worker[];
  models: { name: string; state: string; worker_count: number; gpu_types: string[]; total_queue_depth: number }[];
  queues: { pool: string; machine_profile: string; bundle: string; priority: string; messages: number; oldest_s: number }[] | null;
  failures: Record<string, string>;
}

export interface Placed {
  model: string;
  hosts: Record<string, string>;
  memory_bytes: number;
  tokens_per_s: number;
  waiting: number;
  oldest_s: number;
  raised_s: number | null;
}

export interface PlacedLane {
  lane: string;
  age_s: number;
  workers: number;
  models: number;
  shown: Placed[];
}

export interface Report {
  status: "fine" | "wrong" | "blind";
  checks: { check: string; state: "fine" | "wrong" | "absent" | "blind"; says: string; findings: { wrong: string; fix: string }[] }[];
}

export interface History {
  now: number;
  step_s: number;
  stages: string[];
  steps: { at: number; requests: number; errors: Record<string, number>; p50_ms?: number[]; p99_ms?: number[] }[];
}

export interface Slow {
  id: string;
  at: number;
  endpoint: string;
  status: number;
  code: string;
  model: string;
  total_ms: number;
  items: number;
  lane?: string;
  priority?: string;
  tokens?: number;
  trace_id?: string;
  timing?: Record<string, number>;
  chunks?: { worker: string; batch: { items?: number; tokens?: number; chunks?: number } }[];
}

/** Of a multivector: rows and the width of each. */
export interface Multivector {
  token_dims: number;
  num_tokens: number;
  dtype: string;
  values: number[][];
}

/** `start` and `end` count code points; null in what was read from an image. `bbox` is x, y, width and height in pixels of
 * the upright image. */
export interface Entity {
  text: string;
  label: string;
  start: number | null;
  end: number | null;
  score: number;
  bbox?: number[] | null;
}

export interface Found {
  label: string;
  score: number;
  bbox: number[];
}

export interface Relation {
  head: unknown;
  tail: unknown;
  relation?: string;
  label?: string;
  score?: number;
}

export interface Usage {
  prompt_tokens: number;
  truncated?: boolean;
}

export interface Slot {
  id?: string;
  dense?: { dims: number; dtype: string; values: number[]; source?: string };
  sparse?: { dims: number; indices: number[]; values: number[] };
  multivector?: Multivector;
  entities?: Entity[];
  relations?: Relation[];
  classifications?: { label: string; score: number }[];
  objects?: Found[];
  data?: Record<string, unknown>;
  usage?: Usage;
  error?: { code: string; message: string };
}

export interface Score {
  item_id: string;
  score: number | null;
  rank: number;
  usage?: Usage;
  error?: { code: string; message: string };
}

export interface Reply {
  model: string;
  items?: Slot[];
  scores?: Score[];
  usage: { total_tokens: number; truncated_items: number[]; images?: number };
  timing: Record<string, number>;
  fingerprint: string;
  warnings?: string[];
}

/** A token of a text; `start` and `stop` count bytes of its UTF-8, and are null for a special token. */
export interface Token {
  id: number;
  text: string;
  special: boolean;
  start: number | null;
  stop: number | null;
}
