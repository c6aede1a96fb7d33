// Redaction: the hash key of a call, and the restoration of texts without a server.

import { invalid } from "./errors.js";
import type { RedactParams, RestoreMap } from "./types.js";

const KEY_BYTES = 32;

/** Add a random key for all parts of a call, if the style is `hash` and the caller gave no key. */
export function addHashKey(params: RedactParams = {}): RedactParams {
  if (params.style !== "hash" || params.key !== undefined) return params;
  const random = globalThis.crypto;
  if (random === undefined) throw invalid("params.key: expected a key, because this runtime has no globalThis.crypto to create one");
  const bytes = random.getRandomValues(new Uint8Array(KEY_BYTES));
  return { ...params, key: Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("") };
}

/**
 * Return the text before its redaction. `text` and `map`: those of the result. Throws InvalidInputError if `map` belongs to
 * another text.
 */
export function restore(text: string, map: RestoreMap): string {
  const units = map.offsets === "utf16" ? text.split("") : Array.from(text);
  const slice = (start: number, end?: number) => units.slice(start, end).join("");
  const pieces: string[] = [];
  let end = 0;
  let isSame = units.length === map.length;
  for (const part of map.parts) {
    isSame = isSame && end <= part.start && slice(part.start, part.end) === part.replacement;
    pieces.push(slice(end, part.start), part.text);
    end = part.end;
  }
  if (!isSame) throw invalid("map: belongs to another text than this one");
  return pieces.join("") + slice(end);
}
