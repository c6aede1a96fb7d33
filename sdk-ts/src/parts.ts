// A list becomes parts, each part one request, so many in flight at a time; their replies come in input order.

import { unpack } from "./arrays.js";
import { call, isMap, Patience, reading, type Send } from "./calls.js";
import { invalid, SIEError } from "./errors.js";
import { item, named, type Sent } from "./items.js";
import { decode, encode } from "./msgpack.js";
import { quoted, type Session } from "./options.js";
import type { Input, ItemUsage, Shared, Timing, Usage } from "./types.js";

export const MAX_ITEMS = 2048;
export const PART_TOKENS = 16_384;
const PART_BYTES = 32 << 20; // of one body: an eighth of what the server takes
export const CONCURRENCY = 8;

/** Items from `start` on, as they are sent. */
export interface Part {
  start: number;
  items: Sent["value"][];
}

/** The reply to a part. `shared` belongs to each of its results. */
export interface Reply {
  start: number;
  slots: Record<string, unknown>[];
  body: Record<string, unknown>;
  shared: Shared;
  usage: Usage;
}

/** Collects items into parts. */
export class Filling {
  private part: Part = { start: 0, items: [] };
  private tokens = 0;
  private bytes = 0;

  /** `eachTokens` come to every item. */
  constructor(private readonly session: Session, private readonly eachTokens = 0) {}

  get isEmpty(): boolean {
    return this.part.items.length === 0;
  }

  /** Takes an item; the part before it if that is full now. */
  add(sent: Sent): Part | undefined {
    const tokens = sent.tokens + this.eachTokens;
    const most = this.session.options.partTokens ?? PART_TOKENS;
    const { length } = this.part.items;
    const isFull = length === MAX_ITEMS || this.tokens + tokens > most || this.bytes + sent.bytes > PART_BYTES;
    const full = length && isFull ? this.take() : undefined;
    this.part.items.push(sent.value);
    this.tokens += tokens;
    this.bytes += sent.bytes;
    return full;
  }

  /** What is there so far. */
  take(): Part {
    const current = this.part;
    this.part = { start: current.start + current.items.length, items: [] };
    this.tokens = this.bytes = 0;
    return current;
  }
}

/** What the parts of a call have in common. */
export class Request {
  private readonly path: string;
  private readonly patience = new Patience();
  private done = 0;

  /** `answers`: where a reply has one map per item. `fixed`: the rest of each body. */
  constructor(
    verb: string,
    model: string,
    private readonly answers: string,
    private readonly fixed: Record<string, unknown>,
    private readonly session: Session,
    private readonly total: number,
  ) {
    this.path = `/v1/${verb}/${quoted(model, "model")}`;
  }

  /**
   * `byPlace`: items are known by their places, as results of several parts are put together. `session`: that of the call,
   * with another signal.
   */
  async ask(part: Part, byPlace = false, session = this.session): Promise<Reply> {
    const { start } = part;
    const count = part.items.length;
    const items = byPlace ? part.items.map((item, index) => named(item, String(start + index))) : part.items;
    const { onProgress } = this.session.options;
    const answer = await call(
      this.send({ items, ...this.fixed }, start, count),
      session,
      this.patience,
      (cause, remainingMs) => onProgress?.({ done: this.done, total: this.total, cause, remainingMs }),
    ).catch((error: unknown) => {
      throw error instanceof SIEError ? placed(error, start) : error;
    });
    this.done += count;
    onProgress?.({ done: this.done, total: this.total });
    const requestId = answer.headers.get("x-sie-request-id") ?? "";
    return reading(answer, (bytes) => {
      const body = unpackedButVectors(decode(bytes));
      const slots = body[this.answers];
      if (!Array.isArray(slots) || slots.length !== count || !slots.every(isMap)) {
        throw new TypeError(`${this.answers}: expected ${count} maps`);
      }
      return { start, slots, body, shared: shared(body, requestId), usage: usage(body["usage"]) };
    });
  }

  private send(body: unknown, start: number, count: number): Send {
    const headers = { accept: "application/msgpack", "content-type": "application/msgpack" };
    try {
      return { method: "POST", path: this.path, headers, body: encode(body), withinMs: this.session.withinMs };
    } catch (error) {
      const place = `items[${start}] to items[${start + count - 1}], the query or a parameter`;
      throw invalid(`${place}: ${(error as Error).message}`, "", error);
    }
  }
}

/** The replies to all items, in order. */
export async function askAll(
  request: Request,
  inputs: readonly Input[],
  session: Session,
  { byPlace = false, eachTokens = 0 } = {},
): Promise<Reply[]> {
  const filling = new Filling(session, eachTokens);
  const parts: Part[] = [];
  for (const [index, input] of inputs.entries()) {
    const full = filling.add(await item(input, `items[${index}]`));
    if (full) parts.push(full);
  }
  parts.push(filling.take());
  if (parts.length === 1) return [await request.ask(parts[0]!)];
  const ends = new AbortController();
  const outer = session.signal;
  const end = () => ends.abort(outer?.reason);
  outer?.addEventListener("abort", end, { once: true });
  if (outer?.aborted) end();
  const own = session.forCall({ signal: ends.signal });
  const replies: Reply[] = [];
  let next = 0;
  const lane = async () => {
    while (next < parts.length) {
      const place = next++;
      const part = parts[place]!;
      replies[place] = await request.ask(part, byPlace, own);
      part.items = []; // the body is gone: its files need not be held longer
    }
  };
  const lanes = Array.from({ length: Math.min(session.options.concurrency ?? CONCURRENCY, parts.length) }, lane);
  try {
    await Promise.all(lanes);
  } finally {
    outer?.removeEventListener("abort", end);
    ends.abort(); // after an error, the other parts end too
  }
  return replies;
}

/** The vectors of encode are read by their outputs; here are bytes that a client sent as metadata. */
function unpackedButVectors(value: unknown): Record<string, unknown> {
  if (!isMap(value)) throw new TypeError("expected a map");
  for (const slot of [value["items"], value["scores"]].flat()) {
    if (isMap(slot) && "metadata" in slot) slot["metadata"] = unpack(slot["metadata"]);
  }
  return value;
}

function shared(body: Record<string, unknown>, requestId: string): Shared {
  const { model, fingerprint, warnings, explain } = body;
  if (typeof model !== "string") throw new TypeError("expected model");
  const state: Shared = {
    model,
    timing: timing(body["timing"]),
    fingerprint: typeof fingerprint === "string" ? fingerprint : "",
    warnings: Array.isArray(warnings) ? warnings.map(String) : [],
    requestId,
  };
  if (Array.isArray(explain)) state.explain = explain.filter(isMap);
  return state;
}

/** `queue_ms` is `queueMs` here. The server tells each stage by a second, long name too. */
export function timing(value: unknown): Timing {
  const durations: Timing = { queueMs: 0, tokenizationMs: 0, inferenceMs: 0, postprocessingMs: 0, totalMs: 0 };
  for (const [name, ms] of Object.entries(isMap(value) ? value : {})) {
    if (name.endsWith("_ms") && typeof ms === "number") durations[camel(name)] = ms;
  }
  return durations;
}

function camel(name: string): string {
  return name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase());
}

function usage(value: unknown): Usage {
  const body = isMap(value) ? value : {};
  const total: Usage = {
    promptTokens: Number(body["prompt_tokens"] ?? 0),
    totalTokens: Number(body["total_tokens"] ?? 0),
    truncatedItems: Array.isArray(body["truncated_items"]) ? body["truncated_items"].map(Number) : [],
  };
  if (body["images"] !== undefined) total.images = Number(body["images"]);
  return total;
}

export function itemUsage(value: unknown): ItemUsage {
  const body = isMap(value) ? value : {};
  return {
    promptTokens: Number(body["prompt_tokens"] ?? 0),
    totalTokens: Number(body["total_tokens"] ?? 0),
    truncated: body["truncated"] === true,
  };
}

/** The usage of a call in parts. */
export function summed(replies: readonly Reply[]): Usage {
  const total: Usage = { promptTokens: 0, totalTokens: 0, truncatedItems: [] };
  for (const { usage, start } of replies) {
    total.promptTokens += usage.promptTokens;
    total.totalTokens += usage.totalTokens;
    total.truncatedItems.push(...usage.truncatedItems.map((index) => start + index));
    if (usage.images !== undefined) total.images = (total.images ?? 0) + usage.images;
  }
  return total;
}

/** Paths and positions in an error of a part become those of the whole list. */
function placed(error: SIEError, start: number): SIEError {
  const moved = (text: string) => text.replace(/\bitems\[(\d+)\]/g, (_, place: string) => `items[${start + Number(place)}]`);
  if (!start) return error;
  error.message = moved(error.message);
  const errors = error.details["errors"];
  for (const entry of [error.details, ...(Array.isArray(errors) ? errors.filter(isMap) : [])]) {
    for (const name of ["param", "message"]) if (typeof entry[name] === "string") entry[name] = moved(entry[name]);
    if (typeof entry["index"] === "number") entry["index"] += start;
  }
  return error;
}
