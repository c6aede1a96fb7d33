// Everything but the three verbs and `watch`: models, health, pools.

import { deleteCall, jsonCall } from "./calls.js";
import { quoted, type Session } from "./options.js";
import type { CallOptions } from "./options.js";
import type { Health, Model, ModelFilters, Pool, PoolOptions } from "./types.js";
import { unreadable } from "./errors.js";

export async function models(filters: ModelFilters, session: Session): Promise<Model[]> {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(filters)) if (value !== undefined) query.set(name, String(value));
  const path = `/v1/models${String(query) ? `?${query}` : ""}`;
  return list<Model>((await jsonCall<{ data: unknown }>("GET", path, session, ["data"])).data, "data");
}

export function model(id: string, session: Session): Promise<Model> {
  return jsonCall<Model>("GET", `/v1/models/${quoted(id, "model")}`, session, ["name", "tasks", "outputs"]);
}

export function health(session: Session): Promise<Health> {
  return jsonCall<Health>("GET", "/health", session, ["status", "workers", "models", "cluster"]);
}

function list<T>(value: unknown, name: string): T[] {
  if (!Array.isArray(value)) throw unreadable(`${name}: expected a list`);
  return value as T[];
}

const POOL = ["name", "spec", "status"] as const;

/** Reservations of workers. Their bodies are those of the server. */
export class Pools {
  constructor(private readonly session: Session) {}

  /** All pools, `default` among them. */
  async list(options?: CallOptions): Promise<Pool[]> {
    const session = this.session.forCall(options);
    return list<Pool>((await jsonCall<{ pools: unknown }>("GET", "/v1/pools", session, ["pools"])).pools, "pools");
  }

  /** Throws PoolNotFoundError also when its lease has lapsed. */
  async get(name: string, options?: CallOptions): Promise<Pool> {
    return jsonCall<Pool>("GET", `/v1/pools/${quoted(name, "pool")}`, this.session.forCall(options), POOL);
  }

  /** Reserves workers, as many of each machine profile as `gpus` says. The same again renews the lease. */
  async create(name: string, gpus: Record<string, number>, pool: PoolOptions = {}, options?: CallOptions): Promise<Pool> {
    return jsonCall<Pool>("POST", "/v1/pools", this.session.forCall(options), POOL, { ...pool, name, gpus });
  }

  /** Renews a lease; when it ends now. */
  async renew(name: string, options?: CallOptions): Promise<Date> {
    const path = `/v1/pools/${quoted(name, "pool")}/renew`;
    const reply = await jsonCall<{ expires_at: number }>("POST", path, this.session.forCall(options), ["expires_at"]);
    return new Date(reply.expires_at * 1000);
  }

  /** Gives the workers of a reservation back. */
  async delete(name: string, options?: CallOptions): Promise<void> {
    await deleteCall(`/v1/pools/${quoted(name, "pool")}`, this.session.forCall(options));
  }
}
