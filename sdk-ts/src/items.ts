// Items as they are sent: files as bytes, matrices as arrays, and an estimate of what each costs.

import { packedMatrix } from "./arrays.js";
import { invalid } from "./errors.js";
import { isPlain } from "./msgpack.js";
import type { File, Input, Media } from "./types.js";

const FILES = ["document", "audio", "video"] as const;
// estimates are for splitting alone, the server counts truly
const BYTES_PER_TOKEN = 4;
const SPECIAL_TOKENS = 2;
const MAX_TOKENS = 8192; // that one text can cost; models cut long ones, most of them earlier
const FILE_TOKENS = 1024;
const IMAGE_TOKENS = 256;

export interface Sent {
  value: string | Record<string, unknown>;
  tokens: number;
  bytes: number;
}

/** An item as it is sent, its files read. `path` names it in errors. Throws InvalidInputError. */
export async function item(input: Input, path: string): Promise<Sent> {
  if (typeof input === "string") return { value: input, ...weight(input) };
  const plain: unknown = input;
  if (typeof plain !== "object" || plain === null || !isPlain(plain)) {
    throw invalid(`${path}: expected a string or an object, got ${plain === null ? "null" : typeof plain}`, path);
  }
  const value: Record<string, unknown> = { ...input };
  let { tokens, bytes } = weight(typeof input.text === "string" ? input.text : "");
  if (input.chunks != null) tokens = Math.max(tokens, Math.floor(bytes / BYTES_PER_TOKEN)); // read to its end
  const add = (sent: unknown, cost: number) => {
    const data = typeof sent === "string" ? sent : (sent as { data: string | Uint8Array }).data;
    tokens += cost;
    bytes += data.length;
    return sent;
  };
  if (input.images != null) {
    const several = Array.isArray(input.images) ? input.images : [input.images];
    value["images"] = await Promise.all(
      several.map(async (image, index) => add(await media(image, `${path}.images[${index}]`), IMAGE_TOKENS)),
    );
  }
  for (const name of FILES) {
    if (input[name] != null) value[name] = add(await media(input[name], `${path}.${name}`), FILE_TOKENS);
  }
  if (input.multivector != null) {
    try {
      const sent = packedMatrix(input.multivector);
      value["multivector"] = sent;
      tokens += (sent["shape"] as number[])[0]!;
      bytes += (sent["data"] as Uint8Array).length;
    } catch (error) {
      throw invalid(`${path}.multivector: ${(error as Error).message}`, `${path}.multivector`, error);
    }
  }
  return { value, tokens, bytes };
}

/** With an id in place of its own. */
export function named(value: Sent["value"], id: string): Record<string, unknown> {
  return typeof value === "string" ? { text: value, id } : { ...value, id };
}

export function idOf(input: Input, place: number): string {
  return (typeof input === "string" ? undefined : input.id) ?? `item-${place}`;
}

function weight(text: string): { tokens: number; bytes: number } {
  let bytes = text.length;
  for (let at = 0; at < text.length; at++) {
    const unit = text.charCodeAt(at);
    // a surrogate is half of four bytes
    if (unit > 0x7f) bytes += unit > 0x7ff && (unit < 0xd800 || unit > 0xdfff) ? 2 : 1;
  }
  return { tokens: Math.min(MAX_TOKENS, Math.floor(bytes / BYTES_PER_TOKEN) + SPECIAL_TOKENS), bytes };
}

async function media(value: Media, path: string): Promise<string | Record<string, unknown>> {
  if (typeof value === "string") return value;
  if (isFile(value)) return file(value);
  if (typeof value === "object" && value !== null && "data" in value) {
    const { data, ...rest } = value;
    if (typeof data === "string") return { data, ...rest };
    if (isFile(data)) return { ...(await file(data)), ...rest };
  }
  throw invalid(`${path}: expected bytes, a Blob, a string of base64, a data URI, or an object with data`, path);
}

function isFile(value: unknown): value is Exclude<File, string> {
  return value instanceof Uint8Array || value instanceof ArrayBuffer || value instanceof Blob;
}

async function file(value: Exclude<File, string>): Promise<{ data: Uint8Array }> {
  if (value instanceof Uint8Array) return { data: value };
  return { data: new Uint8Array(value instanceof Blob ? await value.arrayBuffer() : value) };
}
