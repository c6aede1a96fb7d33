import { useMemo } from "preact/hooks";
import { isTruncated } from "./playground-truncation";
import { type NamedInput, Bars, shorten, scaleStep, useReply } from "./playground-shared";
import type { Reply, Token } from "./types";
import { cosines, principalComponents } from "./vectors";

const MOST_WORDS = 2000; // of one request for the words of ids
const BARS = 12;

const NAMED_POINTS = 12; // more have their numbers alone

/** Cosines of all pairs. The colour is that of a pair among the others; an input with itself has none. */
export function SimilarityTable({ matrix, names }: { matrix: number[][]; names: string[] }) {
  const pairs = matrix.flatMap((row, i) => row.filter((_, j) => i !== j));
  const [least, most] = [Math.min(...pairs), Math.max(...pairs)];
  return (
    <>
      <h3>Pairwise similarity (cosine)</h3>
      <div class="scroll" tabIndex={0} role="group" aria-label="Pairwise similarity">
        <table class="heat">
          <thead><tr><th scope="col">text</th>{names.map((name, place) => <th scope="col" title={name}>{place + 1}</th>)}</tr></thead>
          <tbody>
            {matrix.map((row, i) => (
              <tr>
                <th scope="row" title={names[i]}>{`${i + 1} ${shorten(names[i] ?? "")}`}</th>
                {row.map((value, j) => (
                  <td class={i === j ? "self" : `heat-${scaleStep(value, least, most, 10)}`} title={`${i + 1} and ${j + 1}`}>{value.toFixed(2)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {pairs.length > 2 && <p class="legend">{least.toFixed(2)}<span class="scale" aria-hidden="true" />{`${most.toFixed(2)}, the most alike`}</p>}
    </>
  );
}

export function DenseVectors({ vectors, inputs }: { vectors: number[][]; inputs: NamedInput[] }) {
  const matrix = useMemo(() => cosines(vectors), [vectors]);
  const points = useMemo(() => principalComponents(vectors), [vectors]);
  const reach = Math.max(1e-9, ...points.flat().map(Math.abs));
  const name = (place: number): string => inputs[place]?.name ?? "";
  const pairs = matrix
    .flatMap((row, i) => row.slice(i + 1).map((value, offset) => ({ i, j: i + 1 + offset, value })))
    .sort((a, b) => b.value - a.value)
    .slice(0, 5);
  return (
    <div class="views">
      <div><SimilarityTable matrix={matrix} names={matrix.map((_, place) => name(place))} /></div>
      {pairs.length > 1 && (
        <div>
          <h3>Most alike</h3>
          <ol class="pairs">
            {pairs.map(({ i, j, value }) => <li>{`${value.toFixed(4)}  ${shorten(name(i))} · ${shorten(name(j))}`}</li>)}
          </ol>
        </div>
      )}
      {pairs.length > 1 && (
        <div>
          <h3>Map: near points are alike (two principal components)</h3>
          <svg class="points" viewBox="-1.2 -0.75 2.4 1.5" role="img" aria-label="The inputs on the plane of their two principal components">
            {points.map(([x, y], place) => {
              const [at, isRight] = [x / reach, x > 0];
              return (
                <g>
                  <title>{name(place)}</title>
                  <circle cx={at} cy={(-0.6 * y) / reach} r="0.025" />
                  <text x={at + (isRight ? -0.05 : 0.05)} y={(-0.6 * y) / reach + 0.025} font-size="0.075" text-anchor={isRight ? "end" : "start"}>{vectors.length > NAMED_POINTS ? place + 1 : `${place + 1} ${shorten(name(place), 22)}`}</text>
                </g>
              );
            })}
          </svg>
        </div>
      )}
    </div>
  );
}

interface Weighted {
  place: number;
  weights: Map<number, number>;
  best: [number, number][];
}

/** The weights of each text: the largest as bars, and all of them in the text, by the tokens of its tokenizer. */
export function SparseWeights({ model, reply, inputs }: { model: string; reply: Reply; inputs: NamedInput[] }) {
  const weighted = useMemo(() => (reply.items ?? []).flatMap((item, place): Weighted[] => {
    if (!item.sparse) return [];
    const pairs = item.sparse.indices.map((id, at): [number, number] => [id, item.sparse?.values[at] ?? 0]);
    return [{ place, weights: new Map(pairs), best: pairs.sort((a, b) => b[1] - a[1]).slice(0, BARS) }];
  }), [reply]);
  const ids = useMemo(() => [...new Set(weighted.flatMap(({ best }) => best.map(([id]) => id)))].slice(0, MOST_WORDS), [weighted]);
  const words = useReply<string[]>(ids.length ? `/tei/${model}/decode` : "", { ids: ids.map((id) => [id]), skip_special_tokens: false });
  const texts = weighted.map(({ place }) => inputs[place]?.input.text ?? "");
  const tokens = useReply<Token[][]>(texts.length ? `/tei/${model}/tokenize` : "", { inputs: texts });
  const names = new Map(ids.map((id, at) => [id, words.value?.[at]]));
  const most = Math.max(...weighted.flatMap(({ best }) => best.map(([, value]) => value))); // of all texts, so that bars of two compare
  return (
    <>
      {words.refusal && <p class="warn">{`The words of the token ids are not known: ${words.refusal}`}</p>}
      {weighted.map(({ place, weights, best }, at) => {
        const own = tokens.value?.[at];
        const written = new Set(own?.map((token) => token.id));
        return (
          <>
            <h3>{`${place + 1} ${shorten(inputs[place]?.name ?? "")} (${weights.size} weights)`}</h3>
            {own && <Highlighted text={texts[at] ?? ""} tokens={own} weights={weights} readTokens={reply.items?.[place]?.usage?.truncated ? reply.items[place]?.usage?.prompt_tokens : undefined} />}
            <Bars
              label={`Weights of ${inputs[place]?.name ?? ""}`}
              most={most}
              rows={best.map(([id, value]) => ({
                name: names.get(id)?.trim() || `token ${id}`,
                value,
                title: `token ${id}`,
                note: own && (written.has(id) ? "in the text" : "added"),
              }))}
            />
          </>
        );
      })}
    </>
  );
}

/** A text whose tokens are marked by their weights. `readTokens`: how many tokens the model read, if that is not all. */
function Highlighted({ text, tokens, weights, readTokens }: { text: string; tokens: Token[]; weights: Map<number, number>; readTokens?: number }) {
  const bytes = new TextEncoder().encode(text);
  const decoder = new TextDecoder();
  const most = Math.max(1e-9, ...tokens.map((token) => weights.get(token.id) ?? 0));
  const pieces: preact.ComponentChild[] = [];
  let at = 0;
  tokens.forEach((token, order) => {
    const weight = weights.get(token.id) ?? 0;
    const title = `token ${token.id}, weight ${weight.toFixed(4)}`;
    const strength = `weight-${weight > 0 ? Math.max(1, scaleStep(weight, 0, most, 5)) : 0} ${readTokens !== undefined && isTruncated(token, order, readTokens) ? "cut" : ""}`;
    if (token.start === null || token.stop === null) {
      pieces.push(<mark class={`special ${strength}`} title={title} data-id={token.id}>{token.text}</mark>);
      return;
    }
    if (token.start > at) pieces.push(decoder.decode(bytes.slice(at, token.start)));
    const from = Math.max(at, token.start);
    if (token.stop > from) pieces.push(<mark class={strength} title={title} data-id={token.id}>{decoder.decode(bytes.slice(from, token.stop))}</mark>);
    at = Math.max(at, token.stop);
  });
  if (at < bytes.length) pieces.push(decoder.decode(bytes.slice(at)));
  return <p class="tokens">{pieces}</p>;
}
