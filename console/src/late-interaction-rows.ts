/** What the rows of a late-interaction vector stand for. The reply does not say it, so it is told from the tokens of the
 * text and the number of rows; what does not add up gets numbers, not guesses. */

import type { Token, Usage } from "./types";

export interface RowNames {
  names: string[];
  known: boolean;
}

const ASCII_PUNCTUATION = /^[!-/:-@[-`{-~]$/;
const MARKER = { query: "[Q]", document: "[D]" } as const; // as ColBERT writes them

/** Whether the model puts a marker into its rows, told from a text that was not cut. */
export const hasMarker = (tokens: Token[] | undefined, usage: Usage | undefined): boolean =>
  Boolean(tokens?.length && usage && !usage.truncated && usage.prompt_tokens === tokens.length + 1);

/** `tokens`: of the whole text, with its special tokens. A marker stands behind the first token. A text that is too long is
 * cut before its last token. Models with markers have no rows for punctuation of documents, some others none for the first
 * token. A query is filled up to a length. */
export function rowNames(tokens: Token[] | undefined, count: number, side: "query" | "document", marked: boolean, usage: Usage | undefined): RowNames {
  const numbered: RowNames = { names: Array.from({ length: count }, (_, place) => `row ${place + 1}`), known: false };
  if (!tokens?.length || !usage) return numbered;
  let names = tokens.map((token) => token.text);
  if (marked) names.splice(1, 0, MARKER[side]);
  const read = usage.prompt_tokens;
  if (usage.truncated && read < names.length) names = [...names.slice(0, read - 1), names.at(-1) ?? ""];
  const words = names.filter((name) => !ASCII_PUNCTUATION.test(name));
  for (const order of marked ? [names, words, names.slice(1)] : [names, names.slice(1), words]) {
    if (order.length === count) return { names: order, known: true };
  }
  if (side === "document" || count < names.length) return numbered;
  return { names: [...names, ...Array.from({ length: count - names.length }, () => "[fill]")], known: true };
}

export interface Grid {
  across: number;
  down: number;
  first: number;
}

const SQUARE = 28; // pixels of an image that are one row, and the most rows, of ColQwen2.5
const MOST_SQUARES = 768;

/** The grid of patches that an image of this size probably has in so many rows. PaliGemma (ColPali) scales each image to a
 * square whose side is a power of two patches, with the prompt behind them. Qwen keeps the shape, with four tokens before
 * it. */
export function estimateGrid(model: string, count: number, width: number, height: number): Grid {
  if (/qwen/i.test(model) && width && height) {
    const shrunk = Math.min(1, Math.sqrt((MOST_SQUARES * SQUARE * SQUARE) / (width * height)));
    const rounded = shrunk < 1 ? Math.floor : Math.round;
    const [across, down] = [width, height].map((edge) => Math.max(1, rounded((edge * shrunk) / SQUARE))) as [number, number];
    if (across * down + 4 <= count) return { across, down, first: 4 };
  }
  const side = 2 ** Math.floor(Math.log2(Math.sqrt(Math.max(1, count - 1))));
  return { across: side, down: side, first: 0 };
}
