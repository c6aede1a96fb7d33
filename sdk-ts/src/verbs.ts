// encode, score, extract and redact: a list is sent in parts, and the replies become one result for each item.

import { type Matrix, readArray, readVector } from "./arrays.js";
import { isMap } from "./calls.js";
import { errorClass, InvalidInputError, invalid, type SIEError, unreadable } from "./errors.js";
import { prepareItem, resolveId } from "./items.js";
import { type PartReply, PartSender, readItemUsage, readTiming, sendParts, sumUsage } from "./parts.js";
import type { Session } from "./options.js";
import { applySchema, toJsonSchema } from "./schemas.js";
import type {
  EncodeParams, EncodeResult, ExtractParams, ExtractResult, Input, Output, Outputs, RedactedSpan, RedactParams,
  RedactResult, RestoreMap, Results, Schema, SchemaResult, ScoreEntry, ScoreParams, ScoreResult, Usage,
} from "./types.js";

/** Verb with one result for each item. `readResult`: reads the result of the item `input` from its slot of a reply. */
export interface Verb<R> {
  name: string;
  readResult: (reply: PartReply, slot: Record<string, unknown>, input: Input, place: number) => R;
}

export const ENCODE: Verb<EncodeResult> = { name: "encode", readResult: readEncodeResult };
export const EXTRACT: Verb<ExtractResult> = { name: "extract", readResult: readExtractResult };
export const REDACT: Verb<RedactResult> = { name: "redact", readResult: readRedactResult };

/** Read the results of the items from a reply. Throws ServerError for an invalid reply. */
export function readResults<R>(verb: Verb<R>, reply: PartReply, inputs: readonly Input[]): R[] {
  return reply.slots.map((slot, index) => {
    const place = reply.start + index;
    try {
      return verb.readResult(reply, slot, inputs[index]!, place);
    } catch (error) {
      throw unreadable(`items[${place}]: ${(error as Error).message}`, reply.shared.requestId, error);
    }
  });
}

/** Send a list to a verb. Return the results in input order. */
export async function callVerb<R>(
  verb: Verb<R>,
  model: string,
  inputs: readonly Input[],
  params: EncodeParams | ExtractParams | RedactParams | undefined,
  session: Session,
): Promise<Results<R>> {
  const sender = new PartSender(verb.name, model, "items", { params: params ?? {} }, session, inputs.length);
  if (!inputs.length) return addUsage([], sumUsage([]));
  const replies = await sendParts(sender, inputs, session);
  const results = replies.flatMap((reply) =>
    readResults(verb, reply, inputs.slice(reply.start, reply.start + reply.slots.length)),
  );
  return addUsage(results, sumUsage(replies));
}

/** Send a list to extract with the JSON Schema of `schema`. Return the results; `data` has the type of the schema. */
export async function extractBySchema(
  model: string,
  inputs: readonly Input[],
  params: ExtractParams | undefined,
  session: Session,
  schema: Schema,
): Promise<Results<SchemaResult<unknown>>> {
  if (params?.output_schema) throw invalid("schema: expected schema or params.output_schema, got both", "schema");
  const outputSchema = toJsonSchema(schema);
  const extracted = await callVerb(EXTRACT, model, inputs, { ...params, output_schema: { ...outputSchema } }, session);
  const results = extracted.map(async ({ data, error, ...result }, place): Promise<SchemaResult<unknown>> => {
    if (error) return { ...result, error };
    try {
      return { ...result, data: await applySchema(schema, data) };
    } catch (cause) {
      const message = `items[${place}]: its values do not fit the schema: ${(cause as Error).message}`;
      const failure = new InvalidInputError(message, { code: "INVALID_INPUT", requestId: result.requestId, cause });
      if (params?.on_item_error === "fail") throw failure;
      return { ...result, error: failure };
    }
  });
  return addUsage(await Promise.all(results), extracted.usage);
}

function addUsage<R>(results: R[], usage: Usage): Results<R> {
  return Object.assign(results, { usage });
}

/** Send a query and a list to score. Return the scores of the whole list, best first. */
export async function score(
  model: string,
  query: Input,
  inputs: readonly Input[],
  params: ScoreParams | undefined,
  session: Session,
): Promise<ScoreResult> {
  const preparedQuery = await prepareItem(query, "query");
  const fixedFields = { query: preparedQuery.value, params: params ?? {} };
  const sender = new PartSender("score", model, "scores", fixedFields, session, inputs.length);
  // positions as ids, because the server sorts the scores, and two items may have the same id
  const replies = await sendParts(sender, inputs, session, { byPlace: true, extraTokens: preparedQuery.tokens });
  let scores = replies.flatMap((reply) => reply.slots.map((slot) => readScoreEntry(slot, reply)));
  if (replies.length > 1) {
    scores.sort(
      (first, second) =>
        Number(first.score === null) - Number(second.score === null) ||
        (second.score ?? 0) - (first.score ?? 0) ||
        Number(first.itemId) - Number(second.itemId),
    );
    scores = scores.map((entry, rank) => {
      const input = inputs[Number(entry.itemId)];
      if (input === undefined) throw unreadable(`scores: there is no item ${entry.itemId}`, replies[0]!.shared.requestId);
      return { ...entry, rank, itemId: resolveId(input, Number(entry.itemId)) };
    });
  }
  const last = replies.filter(({ failure }) => !failure).pop()!;
  const queryId = last.body["query_id"];
  return { ...last.shared, queryId: typeof queryId === "string" ? queryId : null, scores, usage: sumUsage(replies) };
}

function readScoreEntry(slot: Record<string, unknown>, reply: PartReply): ScoreEntry {
  const { item_id: itemId, score: value, rank } = slot;
  if (typeof itemId !== "string" || (typeof value !== "number" && value !== null)) {
    throw unreadable("scores: expected entries with item_id and score", reply.shared.requestId);
  }
  const entry: ScoreEntry = { itemId, score: value, rank: Number(rank), usage: readItemUsage(slot["usage"]) };
  if (isMap(slot["metadata"])) entry.metadata = slot["metadata"];
  if (isMap(slot["error"])) entry.error = readItemError(slot["error"], reply);
  return entry;
}

function readItemError(slot: Record<string, unknown>, reply: PartReply): SIEError {
  const code = String(slot["code"] ?? "");
  const retryAfterS = slot["retry_after_s"];
  const facts = { code, requestId: reply.shared.requestId, retryable: slot["retryable"] === true, details: slot };
  const after = typeof retryAfterS === "number" ? { retryAfterMs: retryAfterS * 1000 } : {};
  return new (errorClass(code, 0))(`${code}: ${String(slot["message"] ?? "")}`, { ...facts, ...after });
}

/** Read the fields that the results of encode, extract and redact have in common. */
function readCommonFields(reply: PartReply, slot: Record<string, unknown>) {
  return {
    ...reply.shared,
    ...(isMap(slot["timing"]) ? { timing: readTiming(slot["timing"]) } : {}),
    ...(isMap(slot["metadata"]) ? { metadata: slot["metadata"] } : {}),
    ...(isMap(slot["error"]) ? { error: readItemError(slot["error"], reply) } : {}),
    usage: readItemUsage(slot["usage"]),
  };
}

function readEncodeResult(reply: PartReply, slot: Record<string, unknown>): EncodeResult {
  const { id, chunks } = slot;
  const result: EncodeResult = { ...readCommonFields(reply, slot), ...readOutputs(slot) };
  if (typeof id === "string") result.id = id;
  if (isMap(reply.body["muvera"])) result.muvera = reply.body["muvera"];
  if (Array.isArray(chunks)) {
    result.chunks = chunks.filter(isMap).map((chunk) => {
      const span = { start: Number(chunk["start"]), end: Number(chunk["end"]), tokens: Number(chunk["tokens"]) };
      return { ...span, ...readOutputs(chunk) };
    });
  }
  return result;
}

/** Read the outputs of an item or of a chunk. */
function readOutputs(slot: Record<string, unknown>): Outputs {
  const { dense, sparse, multivector } = slot;
  const result: Outputs = { outputs: {} };
  if (isMap(dense)) {
    result.dense = readVector(dense["values"]);
    result.outputs.dense = readOutput(dense);
  }
  if (isMap(sparse)) {
    const indices = readVector(sparse["indices"]);
    if (!(indices instanceof Int32Array)) throw new TypeError("sparse: expected indices of int32");
    result.sparse = { indices, values: readVector(sparse["values"]) };
    result.outputs.sparse = readOutput(sparse);
  }
  if (isMap(multivector)) {
    const tokens: Matrix = readArray(multivector["values"]);
    if (tokens.shape.length !== 2) throw new TypeError("multivector: expected two axes");
    result.multivector = tokens;
    result.outputs.multivector = readOutput(multivector);
  }
  return result;
}

function readOutput(body: Record<string, unknown>): Output {
  const output: Output = { dtype: String(body["dtype"]), dims: Number(body["dims"] ?? body["token_dims"]) };
  for (const name of ["scale", "offset"] as const) {
    const value = body[name];
    if (value !== undefined) output[name] = isMap(value) ? readVector(value) : Number(value);
  }
  if (typeof body["source"] === "string") output.source = body["source"];
  return output;
}

function readExtractResult(reply: PartReply, slot: Record<string, unknown>, input: Input, place: number): ExtractResult {
  const readList = (name: string) => {
    const value = slot[name];
    return Array.isArray(value) ? value.filter(isMap) : [];
  };
  return {
    ...readCommonFields(reply, slot),
    id: resolveId(input, place),
    entities: readList("entities") as ExtractResult["entities"],
    relations: readList("relations"),
    classifications: readList("classifications"),
    objects: readList("objects"),
    data: isMap(slot["data"]) ? slot["data"] : {},
  };
}

function readRedactResult(reply: PartReply, slot: Record<string, unknown>, input: Input, place: number): RedactResult {
  const result: RedactResult = { ...readCommonFields(reply, slot), id: resolveId(input, place) };
  if (result.error !== undefined) return result;
  const { text, spans, map } = slot;
  if (typeof text !== "string" || !Array.isArray(spans)) throw new TypeError("expected text and spans");
  const mapField = isMap(map) ? { map: map as unknown as RestoreMap } : {};
  return { ...result, text, spans: spans as RedactedSpan[], ...mapField };
}
