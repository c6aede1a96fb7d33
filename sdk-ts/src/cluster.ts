// Models, health and pools.

import { deleteCall, jsonCall } from "./calls.js";
import { quoteName, type Session } from "./options.js";
import type { CallOptions } from "./options.js";
import type { Health, Model, ModelFilters, Pool, PoolOptions } from "./types.js";
import { unreadable } from "./errors.js";

export async function models(filters: ModelFilters, session: Session): Promise<Model[]> {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(filters)) if (value !== undefined) query.set(name, String(value));
  const path = `/v1/models${String(query) ? `?${query}` : ""}`;
  return checkList<Model>((await jsonCall<{ data: unknown }>("GET", path, session, ["data"])).data, "data");
}

export function model(id: string, session: Session): Promise<Model> {
  return jsonCall<Model>("GET", `/v1/models/${quoteName(id, "model")}`, session, ["name", "tasks", "outputs"]);
}

export function health(session: Session): Promise<Health> {
  return jsonCall<Health>("GET", "/health", session, ["status", "workers", "models", "cluster"]);
}

function checkList<T>(value: unknown, name: string): T[] {
  if (!Array.isArray(value)) throw unreadable(`${name}: expected a list`);
  return value as T[];
}

const POOL = ["name", "spec", "status"] as const;
const MAX_DATE_MS = 8.64e15; // the last time that a Date can have

/** Pools and reservations of workers. Requests and replies have the fields of the server's API. */
export class Pools {
  constructor(private readonly session: Session) {}

  /** Return all pools, also `default`. */
  async list(options?: CallOptions): Promise<Pool[]> {
    const session = this.session.forCall(options);
    return checkList<Pool>((await jsonCall<{ pools: unknown }>("GET", "/v1/pools", session, ["pools"])).pools, "pools");
  }

  /** Return one pool. Throws PoolNotFoundError if it does not exist, or its lease has ended. */
  async get(name: string, options?: CallOptions): Promise<Pool> {
    return jsonCall<Pool>("GET", `/v1/pools/${quoteName(name, "pool")}`, this.session.forCall(options), POOL);
  }

  /** Reserve workers. `gpus`: their number by machine profile. A repeated call replaces the spec and renews the lease. */
  async create(name: string, gpus: Record<string, number>, pool: PoolOptions = {}, options?: CallOptions): Promise<Pool> {
    return jsonCall<Pool>("POST", "/v1/pools", this.session.forCall(options), POOL, { ...pool, name, gpus });
  }

  /** Renew the lease of a reservation. Return the time at which it ends now; the last time of all for a pool without a lease. */
  async renew(name: string, options?: CallOptions): Promise<Date> {
    const path = `/v1/pools/${quoteName(name, "pool")}/renew`;
    const reply = await jsonCall<{ expires_at: number | null }>("POST", path, this.session.forCall(options), ["expires_at"]);
    return new Date(reply.expires_at === null ? MAX_DATE_MS : reply.expires_at * 1000);
  }

  /** Delete a reservation. Its workers return to their own pool. */
  async delete(name: string, options?: CallOptions): Promise<void> {
    await deleteCall(`/v1/pools/${quoteName(name, "pool")}`, this.session.forCall(options));
  }
}
