// Parts of a list: a long list is split, each part is sent as one request, and the replies are returned in input order.

import { unpackArrays } from "./arrays.js";
import { call, isMap, Patience, readBody, type Send } from "./calls.js";
import { invalid, SIEError } from "./errors.js";
import { type PreparedItem, prepareItem, setId } from "./items.js";
import { decode, encode } from "./msgpack.js";
import { quoteName, type Session } from "./options.js";
import type { Input, ItemUsage, Shared, Timing, Usage } from "./types.js";

export const MAX_ITEMS = 2048;
export const PART_TOKENS = 16_384;
const PART_BYTES = 32 << 20; // bytes of one body: a third of what the server accepts by default
export const CONCURRENCY = 8;
// optional counts of a usage, and their names in a reply
const OPTIONAL_COUNTS = [["images", "images"], ["cachedItems", "cached_items"], ["cachedTokens", "cached_tokens"]] as const;

/** Part of a list of items, in the form of a request. `start`: position of its first item in the whole list. */
export interface Part {
  start: number;
  items: PreparedItem["value"][];
}

/**
 * Reply to the part that begins at `start`. `slots`: one map for each item. `shared`: fields of each of its results.
 * `failure`: the error of the part, if all of its items failed.
 */
export interface PartReply {
  start: number;
  slots: Record<string, unknown>[];
  body: Record<string, unknown>;
  shared: Shared;
  usage: Usage;
  failure?: SIEError;
}

/** Builder of parts from the items of a list. */
export class PartBuilder {
  private part: Part = { start: 0, items: [] };
  private tokens = 0;
  private bytes = 0;

  /** `extraTokens`: tokens that each item costs in addition to its own. */
  constructor(private readonly session: Session, private readonly extraTokens = 0) {}

  get isEmpty(): boolean {
    return this.part.items.length === 0;
  }

  /** Add an item. Return the part before it if that part has no room for this item. */
  add(item: PreparedItem): Part | undefined {
    const tokens = item.tokens + this.extraTokens;
    const maxTokens = this.session.options.partTokens ?? PART_TOKENS;
    const { length } = this.part.items;
    const isFull = length === MAX_ITEMS || this.tokens + tokens > maxTokens || this.bytes + item.bytes > PART_BYTES;
    const fullPart = length && isFull ? this.takePart() : undefined;
    this.part.items.push(item.value);
    this.tokens += tokens;
    this.bytes += item.bytes;
    return fullPart;
  }

  /** Return the part with the items so far, and begin the next part. */
  takePart(): Part {
    const current = this.part;
    this.part = { start: current.start + current.items.length, items: [] };
    this.tokens = this.bytes = 0;
    return current;
  }
}

/** Sender of the parts of a call. */
export class PartSender {
  private readonly path: string;
  private readonly patience = new Patience();
  private doneItems = 0;

  /** `slotsField`: name of the reply's field that has one map for each item. `fixedFields`: other fields of each body. */
  constructor(
    verb: string,
    private readonly model: string,
    private readonly slotsField: string,
    private readonly fixedFields: Record<string, unknown>,
    private readonly session: Session,
    private readonly total: number,
  ) {
    this.path = `/v1/${verb}/${quoteName(model, "model")}`;
  }

  /**
   * Send one part. `byPlace`: items get their positions in the whole list as ids. `session`: that of the call, with another
   * signal.
   */
  async sendPart(part: Part, byPlace = false, session = this.session): Promise<PartReply> {
    const { start } = part;
    const count = part.items.length;
    const items = byPlace ? part.items.map((item, index) => setId(item, String(start + index))) : part.items;
    const { onProgress } = this.session.options;
    const answer = await call(
      this.buildRequest({ items, ...this.fixedFields }, start, count),
      session,
      this.patience,
      (cause, remainingMs) => onProgress?.({ done: this.doneItems, total: this.total, cause, remainingMs }),
    ).catch((error: unknown) => {
      throw error instanceof SIEError ? shiftPositions(error, start) : error;
    });
    this.addDone(count);
    const requestId = answer.headers.get("x-sie-request-id") ?? "";
    return readBody(answer, (bytes) => {
      const body = unpackMetadata(decode(bytes));
      const slots = body[this.slotsField];
      if (!Array.isArray(slots) || slots.length !== count || !slots.every(isMap)) {
        throw new TypeError(`${this.slotsField}: expected ${count} maps`);
      }
      return { start, slots, body, shared: readShared(body, requestId), usage: readUsage(body["usage"]) };
    });
  }

  /** Send one of several parts. If all of its items failed, return a reply with their errors: items of other parts may succeed. */
  async sendOneOfSeveral(part: Part, byPlace = false, session = this.session): Promise<PartReply> {
    const { start, items } = part;
    try {
      return await this.sendPart(part, byPlace, session);
    } catch (failure) {
      const params = this.fixedFields["params"];
      const errors: unknown = failure instanceof SIEError && failure.details["errors"];
      const isOfAll = (list: unknown): list is Record<string, unknown>[] =>
        Array.isArray(list) && list.length === items.length && list.every((entry, place) => isMap(entry) && entry["index"] === start + place);
      if (!(failure instanceof SIEError) || !isOfAll(errors) || (isMap(params) && params["on_item_error"] === "fail")) throw failure;
      this.addDone(items.length);
      const slots = items.map((item, place) => {
        const { index: _index, id: _id, ...error } = errors[place]!;
        const { id, metadata } = isMap(item) ? item : {};
        return { error, id, metadata, item_id: `${start + place}`, score: null };
      });
      const shared = { model: this.model, timing: readTiming(undefined), fingerprint: "", warnings: [], requestId: failure.requestId };
      return { start, slots, body: {}, shared, usage: readUsage(undefined), failure };
    }
  }

  private addDone(count: number): void {
    this.doneItems += count;
    this.session.options.onProgress?.({ done: this.doneItems, total: this.total });
  }

  private buildRequest(body: unknown, start: number, count: number): Send {
    const headers = { accept: "application/msgpack", "content-type": "application/msgpack" };
    try {
      return { method: "POST", path: this.path, headers, body: encode(body), withinMs: this.session.withinMs };
    } catch (error) {
      const subject = `items[${start}] to items[${start + count - 1}], the query or a parameter`;
      throw invalid(`${subject}: ${(error as Error).message}`, "", error);
    }
  }
}

/**
 * Send a list in parts, several at a time. Return the replies in input order. Throws if all items failed. If a request
 * fails for another reason, the others are stopped.
 */
export async function sendParts(
  sender: PartSender,
  inputs: readonly Input[],
  session: Session,
  { byPlace = false, extraTokens = 0 } = {},
): Promise<PartReply[]> {
  const builder = new PartBuilder(session, extraTokens);
  const parts: Part[] = [];
  for (const [index, input] of inputs.entries()) {
    const fullPart = builder.add(await prepareItem(input, `items[${index}]`));
    if (fullPart) parts.push(fullPart);
  }
  parts.push(builder.takePart());
  if (parts.length === 1) return [await sender.sendPart(parts[0]!)];
  const controller = new AbortController();
  const { signal } = session;
  const abort = () => controller.abort(signal?.reason);
  signal?.addEventListener("abort", abort, { once: true });
  if (signal?.aborted) abort();
  const partSession = session.forCall({ signal: controller.signal });
  const replies: PartReply[] = [];
  let next = 0;
  const sendNextParts = async () => {
    while (next < parts.length) {
      const place = next++;
      const part = parts[place]!;
      replies[place] = await sender.sendOneOfSeveral(part, byPlace, partSession);
      part.items = []; // frees memory: the files of the items are not needed any more
    }
  };
  const { concurrency = CONCURRENCY } = session.options;
  const loops = Array.from({ length: Math.min(concurrency, parts.length) }, sendNextParts);
  try {
    await Promise.all(loops);
  } finally {
    signal?.removeEventListener("abort", abort);
    controller.abort(); // after an error, the other parts end too
  }
  if (replies.every(({ failure }) => failure)) throw replies[0]!.failure;
  return replies;
}

/** Convert arrays in the metadata of items. The vectors of a result are converted when it is read. */
function unpackMetadata(value: unknown): Record<string, unknown> {
  if (!isMap(value)) throw new TypeError("expected a map");
  for (const slot of [value["items"], value["scores"]].flat()) {
    if (isMap(slot) && "metadata" in slot) slot["metadata"] = unpackArrays(slot["metadata"]);
  }
  return value;
}

/** Read the fields that all results of a reply share. */
function readShared(body: Record<string, unknown>, requestId: string): Shared {
  const { model, fingerprint, warnings, explain } = body;
  if (typeof model !== "string") throw new TypeError("expected model");
  const shared: Shared = {
    model,
    timing: readTiming(body["timing"]),
    fingerprint: typeof fingerprint === "string" ? fingerprint : "",
    warnings: Array.isArray(warnings) ? warnings.map(String) : [],
    requestId,
  };
  if (Array.isArray(explain)) shared.explain = explain.filter(isMap);
  return shared;
}

/** Read the stages in milliseconds: `queue_ms` becomes `queueMs`. The server also sends each stage under a long name. */
export function readTiming(value: unknown): Timing {
  const durations: Timing = { queueMs: 0, tokenizationMs: 0, inferenceMs: 0, postprocessingMs: 0, totalMs: 0 };
  for (const [name, ms] of Object.entries(isMap(value) ? value : {})) {
    if (name.endsWith("_ms") && typeof ms === "number") durations[toCamelCase(name)] = ms;
  }
  return durations;
}

function toCamelCase(name: string): string {
  return name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase());
}

function readUsage(value: unknown): Usage {
  const body = isMap(value) ? value : {};
  const usage: Usage = {
    promptTokens: Number(body["prompt_tokens"] ?? 0),
    totalTokens: Number(body["total_tokens"] ?? 0),
    truncatedItems: Array.isArray(body["truncated_items"]) ? body["truncated_items"].map(Number) : [],
  };
  for (const [name, field] of OPTIONAL_COUNTS) {
    if (body[field] !== undefined) usage[name] = Number(body[field]);
  }
  return usage;
}

export function readItemUsage(value: unknown): ItemUsage {
  const body = isMap(value) ? value : {};
  return {
    promptTokens: Number(body["prompt_tokens"] ?? 0),
    totalTokens: Number(body["total_tokens"] ?? 0),
    truncated: body["truncated"] === true,
  };
}

/** Return the usage of a whole call: the sums over the usages of its parts. */
export function sumUsage(replies: readonly PartReply[]): Usage {
  const total: Usage = { promptTokens: 0, totalTokens: 0, truncatedItems: [] };
  for (const { usage, start } of replies) {
    total.promptTokens += usage.promptTokens;
    total.totalTokens += usage.totalTokens;
    total.truncatedItems.push(...usage.truncatedItems.map((index) => start + index));
    for (const [name] of OPTIONAL_COUNTS) {
      const count = usage[name];
      if (count !== undefined) total[name] = (total[name] ?? 0) + count;
    }
  }
  return total;
}

/** Change the item positions in an error about a part, so that they count from the start of the whole list. */
function shiftPositions(error: SIEError, start: number): SIEError {
  const shift = (text: string) => text.replace(/\bitems\[(\d+)\]/g, (_, place: string) => `items[${start + Number(place)}]`);
  if (!start) return error;
  error.message = shift(error.message);
  const errors = error.details["errors"];
  for (const entry of [error.details, ...(Array.isArray(errors) ? errors.filter(isMap) : [])]) {
    for (const name of ["param", "message"]) if (typeof entry[name] === "string") entry[name] = shift(entry[name]);
    if (typeof entry["index"] === "number") entry["index"] += start;
  }
  return error;
}
