import { Bars, shorten, scaleStep } from "./playground-shared";
import type { Chunk } from "./types";
import { cosine } from "./vectors";

const STEPS = 10; // colours of the scale

/** A document whose chunks have colours for their similarity to the query, and the chunks as bars, the most similar first. */
export function Chunks({ chunks, query, text }: { chunks: Chunk[]; query: number[]; text: string }) {
  const points = [...text]; // start and end count code points
  const pieces = chunks.map(({ start, end, tokens, dense }, index) => ({
    index,
    tokens,
    text: points.slice(start, end).join(""),
    value: cosine(dense?.values ?? [], query),
  }));
  const values = pieces.map(({ value }) => value);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const best = [...pieces].sort((a, b) => b.value - a.value);
  return (
    <>
      <h3>Chunks: similarity with the query (cosine)</h3>
      <p class="tokens chunks">
        {pieces.map(({ index, tokens, text: chunkText, value }) => (
          <mark class={`heat-${scaleStep(value, least, most, STEPS)}`} title={`chunk ${index + 1}: ${value.toFixed(4)}, ${tokens} tokens`}>{chunkText}</mark>
        ))}
      </p>
      {chunks.length > 1 && <p class="legend">{least.toFixed(2)}<span class="scale" aria-hidden="true" />{`${most.toFixed(2)}, the most alike`}</p>}
      <Bars label="Chunks, best first" rows={best.map(({ index, text: chunkText, tokens, value }) => ({ name: `${index + 1} ${shorten(chunkText.trim(), 60)}`, value, title: chunkText, note: `${tokens} tokens` }))} />
    </>
  );
}
