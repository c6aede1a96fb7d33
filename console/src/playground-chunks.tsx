import { Bars, shorten, scaleStep } from "./playground-shared";
import type { Chunk } from "./types";
import { cosine } from "./vectors";

const STEPS = 10; // of the colours of similarity

/** A document whose chunks are coloured by their similarity to the query, and the chunks in the order of it. */
export function Chunks({ chunks, query, text }: { chunks: Chunk[]; query: number[]; text: string }) {
  const points = [...text]; // spans count code points
  const pieces = chunks.map(({ start, end, tokens, dense }, place) => ({
    place,
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
        {pieces.map(({ place, tokens, text: own, value }) => (
          <mark class={`heat-${scaleStep(value, least, most, STEPS)}`} title={`chunk ${place + 1}: ${value.toFixed(4)}, ${tokens} tokens`}>{own}</mark>
        ))}
      </p>
      {chunks.length > 1 && <p class="legend">{least.toFixed(2)}<span class="scale" aria-hidden="true" />{`${most.toFixed(2)}, the most alike`}</p>}
      <Bars label="Chunks, best first" rows={best.map(({ place, text: own, tokens, value }) => ({ name: `${place + 1} ${shorten(own.trim(), 60)}`, value, title: own, note: `${tokens} tokens` }))} />
    </>
  );
}
