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
  timing?: Record<string, number>;
  chunks?: { worker: string; batch: { items?: number; tokens?: number; chunks?: number } }[];
}

export interface Vector {
  dims: number;
  dtype: string;
  values: number[] | number[][];
  indices?: number[];
}

export interface Entity {
  text: string;
  label: string;
  start: number;
  end: number;
  score: number;
}

export interface Reply {
  model: string;
  items?: (Record<string, unknown> & {
    dense?: Vector;
    sparse?: { indices: number[]; values: number[] };
    entities?: Entity[];
    usage?: { prompt_tokens: number; truncated?: boolean };
    error?: { code: string; message: string };
  })[];
  scores?: { item_id: string; score: number; rank: number }[];
  usage: { total_tokens: number; truncated_items: number[] };
  timing: Record<string, number>;
  fingerprint: string;
  warnings?: string[];
}
