// Items in the form of a request: files as bytes, matrices as maps of arrays, and an estimate of the cost of each item.

import { packMatrix } from "./arrays.js";
import { invalid } from "./errors.js";
import { isPlain } from "./msgpack.js";
import type { File, Input, Media } from "./types.js";

const FILES = ["document", "audio", "video"] as const;
// constants of the estimate, by which a list is split into parts; the server counts the real tokens
const BYTES_PER_TOKEN = 4;
const SPECIAL_TOKENS = 2;
const MAX_TOKENS = 8192; // maximum of a text: models truncate long texts, most models earlier
const FILE_TOKENS = 1024;
const IMAGE_TOKENS = 256;

/** Item in the form of a request, with its estimated cost. */
export interface PreparedItem {
  value: string | Record<string, unknown>;
  tokens: number;
  bytes: number;
}

/** Convert an item to the form of a request, and read its files. `path` names it in errors. Throws InvalidInputError. */
export async function prepareItem(input: Input, path: string): Promise<PreparedItem> {
  if (typeof input === "string") return { value: input, ...estimateText(input) };
  const plain: unknown = input;
  if (typeof plain !== "object" || plain === null || !isPlain(plain)) {
    throw invalid(`${path}: expected a string or an object, got ${plain === null ? "null" : typeof plain}`, path);
  }
  const value: Record<string, unknown> = { ...input };
  let { tokens, bytes } = estimateText(typeof input.text === "string" ? input.text : "");
  if (input.chunks != null) tokens = Math.max(tokens, Math.floor(bytes / BYTES_PER_TOKEN)); // a text with chunks is not truncated
  const addFile = (file: unknown, cost: number) => {
    const data = typeof file === "string" ? file : (file as { data: string | Uint8Array }).data;
    tokens += cost;
    bytes += data.length;
    return file;
  };
  if (input.images != null) {
    const images = Array.isArray(input.images) ? input.images : [input.images];
    value["images"] = await Promise.all(
      images.map(async (image, index) => addFile(await prepareMedia(image, `${path}.images[${index}]`), IMAGE_TOKENS)),
    );
  }
  for (const name of FILES) {
    if (input[name] != null) value[name] = addFile(await prepareMedia(input[name], `${path}.${name}`), FILE_TOKENS);
  }
  if (input.multivector != null) {
    try {
      const matrix = packMatrix(input.multivector);
      value["multivector"] = matrix;
      tokens += (matrix["shape"] as number[])[0]!;
      bytes += (matrix["data"] as Uint8Array).length;
    } catch (error) {
      throw invalid(`${path}.multivector: ${(error as Error).message}`, `${path}.multivector`, error);
    }
  }
  return { value, tokens, bytes };
}

/** Return an item with `id` in place of its own id. */
export function setId(value: PreparedItem["value"], id: string): Record<string, unknown> {
  return typeof value === "string" ? { text: value, id } : { ...value, id };
}

/** Return the id of an item; without one, the id that the server gives it. */
export function resolveId(input: Input, place: number): string {
  return (typeof input === "string" ? undefined : input.id) ?? `item-${place}`;
}

/** Estimate the tokens of a text, and count its bytes in UTF-8. */
function estimateText(text: string): { tokens: number; bytes: number } {
  let bytes = text.length;
  for (let at = 0; at < text.length; at++) {
    const unit = text.charCodeAt(at);
    // two surrogates together are four bytes
    if (unit > 0x7f) bytes += unit > 0x7ff && (unit < 0xd800 || unit > 0xdfff) ? 2 : 1;
  }
  return { tokens: Math.min(MAX_TOKENS, Math.floor(bytes / BYTES_PER_TOKEN) + SPECIAL_TOKENS), bytes };
}

async function prepareMedia(value: Media, path: string): Promise<string | Record<string, unknown>> {
  if (typeof value === "string") return value;
  if (isFile(value)) return readFile(value);
  if (typeof value === "object" && value !== null && "data" in value) {
    const { data, ...rest } = value;
    if (typeof data === "string") return { data, ...rest };
    if (isFile(data)) return { ...(await readFile(data)), ...rest };
  }
  throw invalid(`${path}: expected bytes, a Blob, a string of base64, a data URI, or an object with data`, path);
}

function isFile(value: unknown): value is Exclude<File, string> {
  return value instanceof Uint8Array || value instanceof ArrayBuffer || value instanceof Blob;
}

async function readFile(value: Exclude<File, string>): Promise<{ data: Uint8Array }> {
  if (value instanceof Uint8Array) return { data: value };
  return { data: new Uint8Array(value instanceof Blob ? await value.arrayBuffer() : value) };
}
