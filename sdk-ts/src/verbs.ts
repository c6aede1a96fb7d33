// encode, score, extract and redact: what of a reply belongs to which item.

import { type Matrix, matrix, vector } from "./arrays.js";
import { isMap } from "./calls.js";
import { errorClass, InvalidInputError, invalid, type SIEError, unreadable } from "./errors.js";
import { idOf, item } from "./items.js";
import { askAll, itemUsage, type Reply, Request, summed, timing } from "./parts.js";
import type { Session } from "./options.js";
import { jsonSchema, typed } from "./schemas.js";
import type {
  EncodeParams, EncodeResult, ExtractParams, ExtractResult, Input, Output, Outputs, RedactedSpan, RedactParams,
  RedactResult, RestoreMap, Results, Schema, SchemaResult, ScoreEntry, ScoreParams, ScoreResult, Usage,
} from "./types.js";

/** A verb that gives one result per item. */
export interface Verb<R> {
  name: string;
  result: (reply: Reply, slot: Record<string, unknown>, input: Input, place: number) => R;
}

export const ENCODE: Verb<EncodeResult> = { name: "encode", result: encoded };
export const EXTRACT: Verb<ExtractResult> = { name: "extract", result: extracted };
export const REDACT: Verb<RedactResult> = { name: "redact", result: redacted };

/** The results of a reply. Throws ServerError for one that is not as it should be. */
export function results<R>(verb: Verb<R>, reply: Reply, inputs: readonly Input[]): R[] {
  return reply.slots.map((slot, index) => {
    const place = reply.start + index;
    try {
      return verb.result(reply, slot, inputs[index]!, place);
    } catch (error) {
      throw unreadable(`items[${place}]: ${(error as Error).message}`, reply.shared.requestId, error);
    }
  });
}

export async function perItem<R>(
  verb: Verb<R>,
  model: string,
  inputs: readonly Input[],
  params: EncodeParams | ExtractParams | RedactParams | undefined,
  session: Session,
): Promise<Results<R>> {
  const request = new Request(verb.name, model, "items", { params: params ?? {} }, session, inputs.length);
  if (!inputs.length) return withUsage([], summed([]));
  const replies = await askAll(request, inputs, session);
  const all = replies.flatMap((reply) =>
    results(verb, reply, inputs.slice(reply.start, reply.start + reply.slots.length)),
  );
  return withUsage(all, summed(replies));
}

/** As `perItem` of extract, whose values become those of a schema. */
export async function perSchema(
  model: string,
  inputs: readonly Input[],
  params: ExtractParams | undefined,
  session: Session,
  schema: Schema,
): Promise<Results<SchemaResult<unknown>>> {
  if (params?.output_schema) throw invalid("schema: expected schema or params.output_schema, got both", "schema");
  const sent = jsonSchema(schema);
  const extracted = await perItem(EXTRACT, model, inputs, { ...params, output_schema: { ...sent } }, session);
  const results = extracted.map(async ({ data, error, ...result }, place): Promise<SchemaResult<unknown>> => {
    if (error) return { ...result, error };
    try {
      return { ...result, data: await typed(schema, data) };
    } catch (cause) {
      const message = `items[${place}]: its values do not fit the schema: ${(cause as Error).message}`;
      const unfit = new InvalidInputError(message, { code: "INVALID_INPUT", requestId: result.requestId, cause });
      if (params?.on_item_error === "fail") throw unfit;
      return { ...result, error: unfit };
    }
  });
  return withUsage(await Promise.all(results), extracted.usage);
}

function withUsage<R>(results: R[], usage: Usage): Results<R> {
  return Object.assign(results, { usage });
}

export async function score(
  model: string,
  query: Input,
  inputs: readonly Input[],
  params: ScoreParams | undefined,
  session: Session,
): Promise<ScoreResult> {
  const sent = await item(query, "query");
  const fixed = { query: sent.value, params: params ?? {} };
  const request = new Request("score", model, "scores", fixed, session, inputs.length);
  // scores come sorted, and ids may be given twice: places tell which entry is whose
  const replies = await askAll(request, inputs, session, { byPlace: true, eachTokens: sent.tokens });
  let scores = replies.flatMap((reply) => reply.slots.map((slot) => scored(slot, reply)));
  if (replies.length > 1) {
    scores.sort(
      (first, second) =>
        Number(first.score === null) - Number(second.score === null) ||
        (second.score ?? 0) - (first.score ?? 0) ||
        Number(first.itemId) - Number(second.itemId),
    );
    scores = scores.map((entry, rank) => ({ ...entry, rank, itemId: idOf(inputs[Number(entry.itemId)]!, Number(entry.itemId)) }));
  }
  const last = replies[replies.length - 1]!;
  const queryId = last.body["query_id"];
  return { ...last.shared, queryId: typeof queryId === "string" ? queryId : null, scores, usage: summed(replies) };
}

function scored(slot: Record<string, unknown>, reply: Reply): ScoreEntry {
  const { item_id: itemId, score: value, rank } = slot;
  if (typeof itemId !== "string" || (typeof value !== "number" && value !== null)) {
    throw unreadable("scores: expected entries with item_id and score", reply.shared.requestId);
  }
  const entry: ScoreEntry = { itemId, score: value, rank: Number(rank), usage: itemUsage(slot["usage"]) };
  if (isMap(slot["metadata"])) entry.metadata = slot["metadata"];
  if (isMap(slot["error"])) entry.error = slotError(slot["error"], reply);
  return entry;
}

function slotError(slot: Record<string, unknown>, reply: Reply): SIEError {
  const code = String(slot["code"] ?? "");
  const retryAfterS = slot["retry_after_s"];
  const facts = { code, requestId: reply.shared.requestId, retryable: slot["retryable"] === true, details: slot };
  const after = typeof retryAfterS === "number" ? { retryAfterMs: retryAfterS * 1000 } : {};
  return new (errorClass(code, 0))(`${code}: ${String(slot["message"] ?? "")}`, { ...facts, ...after });
}

/** What slots of encode, extract and redact have in common. */
function common(reply: Reply, slot: Record<string, unknown>) {
  return {
    ...reply.shared,
    ...(isMap(slot["timing"]) ? { timing: timing(slot["timing"]) } : {}),
    ...(isMap(slot["metadata"]) ? { metadata: slot["metadata"] } : {}),
    ...(isMap(slot["error"]) ? { error: slotError(slot["error"], reply) } : {}),
    usage: itemUsage(slot["usage"]),
  };
}

function encoded(reply: Reply, slot: Record<string, unknown>): EncodeResult {
  const { id, chunks } = slot;
  const result: EncodeResult = { ...common(reply, slot), ...outputs(slot) };
  if (typeof id === "string") result.id = id;
  if (isMap(reply.body["muvera"])) result.muvera = reply.body["muvera"];
  if (Array.isArray(chunks)) {
    result.chunks = chunks.filter(isMap).map((chunk) => {
      const place = { start: Number(chunk["start"]), end: Number(chunk["end"]), tokens: Number(chunk["tokens"]) };
      return { ...place, ...outputs(chunk) };
    });
  }
  return result;
}

/** The outputs of an item or of a chunk. */
function outputs(slot: Record<string, unknown>): Outputs {
  const { dense, sparse, multivector } = slot;
  const result: Outputs = { outputs: {} };
  if (isMap(dense)) {
    result.dense = vector(dense["values"]);
    result.outputs.dense = output(dense);
  }
  if (isMap(sparse)) {
    const indices = vector(sparse["indices"]);
    if (!(indices instanceof Int32Array)) throw new TypeError("sparse: expected indices of int32");
    result.sparse = { indices, values: vector(sparse["values"]) };
    result.outputs.sparse = output(sparse);
  }
  if (isMap(multivector)) {
    const tokens: Matrix = matrix(multivector["values"]);
    if (tokens.shape.length !== 2) throw new TypeError("multivector: expected two axes");
    result.multivector = tokens;
    result.outputs.multivector = output(multivector);
  }
  return result;
}

function output(body: Record<string, unknown>): Output {
  const array: Output = { dtype: String(body["dtype"]), dims: Number(body["dims"] ?? body["token_dims"]) };
  for (const name of ["scale", "offset"] as const) {
    const value = body[name];
    if (value !== undefined) array[name] = isMap(value) ? vector(value) : Number(value);
  }
  if (typeof body["source"] === "string") array.source = body["source"];
  return array;
}

function extracted(reply: Reply, slot: Record<string, unknown>, input: Input, place: number): ExtractResult {
  const list = (name: string) => {
    const value = slot[name];
    return Array.isArray(value) ? value.filter(isMap) : [];
  };
  return {
    ...common(reply, slot),
    id: idOf(input, place),
    entities: list("entities") as ExtractResult["entities"],
    relations: list("relations"),
    classifications: list("classifications"),
    objects: list("objects"),
    data: isMap(slot["data"]) ? slot["data"] : {},
  };
}

function redacted(reply: Reply, slot: Record<string, unknown>, input: Input, place: number): RedactResult {
  const result: RedactResult = { ...common(reply, slot), id: idOf(input, place) };
  if (result.error !== undefined) return result;
  const { text, spans, map } = slot;
  if (typeof text !== "string" || !Array.isArray(spans)) throw new TypeError("expected text and spans");
  const restorable = isMap(map) ? { map: map as unknown as RestoreMap } : {};
  return { ...result, text, spans: spans as RedactedSpan[], ...restorable };
}
