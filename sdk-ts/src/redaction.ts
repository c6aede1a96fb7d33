// Redaction: the key of a call, and restoration without a server.

import { invalid } from "./errors.js";
import type { RedactParams, RestoreMap } from "./types.js";

const KEY_BYTES = 32;

/** The parameters with a key that all parts of a call share, if the style needs one and the caller has none. */
export function keyed(params: RedactParams = {}): RedactParams {
  if (params.style !== "hash" || params.key !== undefined) return params;
  const random = globalThis.crypto;
  if (random === undefined) throw invalid("params.key: expected a key, this runtime has no globalThis.crypto to make one");
  const bytes = random.getRandomValues(new Uint8Array(KEY_BYTES));
  return { ...params, key: Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("") };
}

/**
 * The text before its redaction, from the redacted text and the `map` of its result. Throws InvalidInputError if the map
 * belongs to another text.
 */
export function restore(text: string, map: RestoreMap): string {
  const units = map.offsets === "utf16" ? text.split("") : Array.from(text);
  const piece = (start: number, end?: number) => units.slice(start, end).join("");
  const pieces: string[] = [];
  let end = 0;
  let isSame = units.length === map.length;
  for (const part of map.parts) {
    isSame = isSame && end <= part.start && piece(part.start, part.end) === part.replacement;
    pieces.push(piece(end, part.start), part.text);
    end = part.end;
  }
  if (!isSame) throw invalid("map: belongs to another text than this one");
  return pieces.join("") + piece(end);
}
