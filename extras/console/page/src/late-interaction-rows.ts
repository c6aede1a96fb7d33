/** The tokens or patches behind the rows of a late-interaction vector. The reply does not name them, so they are inferred
 * from the tokens of the text and the number of rows. Rows that do not match the tokens get numbers. */

import type { Token, Usage } from "./types";

/** The names of the rows: tokens if `isCertain`, else numbers. */
export interface RowNames {
  names: string[];
  isCertain: boolean;
}

const ASCII_PUNCTUATION = /^[!-/:-@[-`{-~]$/;
const MARKERS = { query: "[Q]", document: "[D]" } as const; // of ColBERT

/** Return true if the model adds a marker to the tokens of a text. A truncated text does not show it. */
export const hasMarker = (tokens: Token[] | undefined, usage: Usage | undefined): boolean =>
  Boolean(tokens?.length && usage && !usage.truncated && usage.prompt_tokens === tokens.length + 1);

/** Return the names of the rows of a text. `tokens` are those of the whole text, with its special tokens. A marker is behind
 * the first token. A text that is too long is cut before its last token. Models with markers have no rows for punctuation in
 * documents, and some other models have no row for the first token. A query is padded to a length. */
export function rowNames(tokens: Token[] | undefined, count: number, side: "query" | "document", isMarked: boolean, usage: Usage | undefined): RowNames {
  const numbered: RowNames = { names: Array.from({ length: count }, (_, index) => `row ${index + 1}`), isCertain: false };
  if (!tokens?.length || !usage) return numbered;
  let names = tokens.map((token) => token.text);
  if (isMarked) names.splice(1, 0, MARKERS[side]);
  const tokensRead = usage.prompt_tokens;
  if (usage.truncated && tokensRead < names.length) names = [...names.slice(0, tokensRead - 1), names.at(-1) ?? ""];
  const withoutPunctuation = names.filter((name) => !ASCII_PUNCTUATION.test(name));
  for (const candidate of isMarked ? [names, withoutPunctuation, names.slice(1)] : [names, names.slice(1), withoutPunctuation]) {
    if (candidate.length === count) return { names: candidate, isCertain: true };
  }
  if (side === "document" || count < names.length) return numbered;
  return { names: [...names, ...Array.from({ length: count - names.length }, () => "[fill]")], isCertain: true };
}

/** A grid of patches: its columns, its rows, and the number of rows of the vector before it. */
interface Grid {
  across: number;
  down: number;
  first: number;
}

const PATCH_PIXELS = 28; // edge of a patch of ColQwen2.5
const MAX_PATCHES = 768; // of an image, of ColQwen2.5

/** Return the probable grid of patches of an image, from its size in pixels and the number of rows of its vector. PaliGemma
 * (ColPali) scales each image to a square whose side is a power of two patches, with the prompt behind them. Qwen keeps the
 * shape, with four tokens before the patches. */
export function estimateGrid(model: string, count: number, width: number, height: number): Grid {
  if (/qwen/i.test(model) && width && height) {
    const scale = Math.min(1, Math.sqrt((MAX_PATCHES * PATCH_PIXELS * PATCH_PIXELS) / (width * height)));
    const round = scale < 1 ? Math.floor : Math.round;
    const [across, down] = [width, height].map((edge) => Math.max(1, round((edge * scale) / PATCH_PIXELS))) as [number, number];
    if (across * down + 4 <= count) return { across, down, first: 4 };
  }
  const side = 2 ** Math.floor(Math.log2(Math.sqrt(Math.max(1, count - 1))));
  return { across: side, down: side, first: 0 };
}
