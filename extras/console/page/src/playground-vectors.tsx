import { useMemo } from "preact/hooks";
import { isTruncated } from "./playground-truncation";
import { type NamedInput, Bars, shorten, scaleStep, useReply } from "./playground-shared";
import type { Reply, Token } from "./types";
import { cosines, principalComponents } from "./vectors";

const MAX_DECODED = 2000; // token ids of one request
const MAX_BARS = 12;
const MAX_NAMED_POINTS = 12; // with more points, each has only its number

/** The cosines of all pairs. The colours span the values of all pairs of different inputs. */
export function SimilarityTable({ matrix, names }: { matrix: number[][]; names: string[] }) {
  const pairs = matrix.flatMap((row, i) => row.filter((_, j) => i !== j));
  const [least, most] = [Math.min(...pairs), Math.max(...pairs)];
  return (
    <>
      <h3>Pairwise similarity (cosine)</h3>
      <div class="scroll" tabIndex={0} role="group" aria-label="Pairwise similarity">
        <table class="heat">
          <thead><tr><th scope="col">text</th>{names.map((name, index) => <th scope="col" title={name}>{index + 1}</th>)}</tr></thead>
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

/** The dense vectors of a reply: the cosines, the most similar pairs, and a map. */
export function DenseVectors({ vectors, inputs }: { vectors: number[][]; inputs: NamedInput[] }) {
  const matrix = useMemo(() => cosines(vectors), [vectors]);
  const points = useMemo(() => principalComponents(vectors), [vectors]);
  const reach = Math.max(1e-9, ...points.flat().map(Math.abs));
  const name = (index: number): string => inputs[index]?.name ?? "";
  const pairs = matrix
    .flatMap((row, i) => row.slice(i + 1).map((value, offset) => ({ i, j: i + 1 + offset, value })))
    .sort((a, b) => b.value - a.value)
    .slice(0, 5);
  return (
    <div class="views">
      <div><SimilarityTable matrix={matrix} names={matrix.map((_, index) => name(index))} /></div>
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
            {points.map(([x, y], index) => {
              const [centre, isRight] = [x / reach, x > 0];
              return (
                <g>
                  <title>{name(index)}</title>
                  <circle cx={centre} cy={(-0.6 * y) / reach} r="0.025" />
                  <text x={centre + (isRight ? -0.05 : 0.05)} y={(-0.6 * y) / reach + 0.025} font-size="0.075" text-anchor={isRight ? "end" : "start"}>{vectors.length > MAX_NAMED_POINTS ? index + 1 : `${index + 1} ${shorten(name(index), 22)}`}</text>
                </g>
              );
            })}
          </svg>
        </div>
      )}
    </div>
  );
}

interface WeightedInput {
  index: number;
  weights: Map<number, number>;
  best: [number, number][];
}

/** The sparse weights of each text: the largest as bars, and all as marks on its tokens. */
export function SparseWeights({ model, reply, inputs }: { model: string; reply: Reply; inputs: NamedInput[] }) {
  const weighted = useMemo(() => (reply.items ?? []).flatMap((item, index): WeightedInput[] => {
    if (!item.sparse) return [];
    const pairs = item.sparse.indices.map((id, position): [number, number] => [id, item.sparse?.values[position] ?? 0]);
    return [{ index, weights: new Map(pairs), best: pairs.sort((a, b) => b[1] - a[1]).slice(0, MAX_BARS) }];
  }), [reply]);
  const ids = useMemo(() => [...new Set(weighted.flatMap(({ best }) => best.map(([id]) => id)))].slice(0, MAX_DECODED), [weighted]);
  const decoded = useReply<string[]>(ids.length ? `/tei/${model}/decode` : "", { ids: ids.map((id) => [id]), skip_special_tokens: false });
  const texts = weighted.map(({ index }) => inputs[index]?.input.text ?? "");
  const tokens = useReply<Token[][]>(texts.length ? `/tei/${model}/tokenize` : "", { inputs: texts });
  const names = new Map(ids.map((id, index) => [id, decoded.value?.[index]]));
  const most = Math.max(...weighted.flatMap(({ best }) => best.map(([, value]) => value))); // one scale for the bars of all texts
  return (
    <>
      {decoded.refusal && <p class="warn">{`The texts of the token ids are not known: ${decoded.refusal}`}</p>}
      {weighted.map(({ index, weights, best }, position) => {
        const textTokens = tokens.value?.[position];
        const textIds = new Set(textTokens?.map((token) => token.id));
        return (
          <>
            <h3>{`${index + 1} ${shorten(inputs[index]?.name ?? "")} (${weights.size} weights)`}</h3>
            {textTokens && <HighlightedText text={texts[position] ?? ""} tokens={textTokens} weights={weights} tokensRead={reply.items?.[index]?.usage?.truncated ? reply.items[index]?.usage?.prompt_tokens : undefined} />}
            <Bars
              label={`Weights of ${inputs[index]?.name ?? ""}`}
              most={most}
              rows={best.map(([id, value]) => ({
                name: names.get(id)?.trim() || `token ${id}`,
                value,
                title: `token ${id}`,
                note: textTokens && (textIds.has(id) ? "in the text" : "added"),
              }))}
            />
          </>
        );
      })}
    </>
  );
}

/** A text with marks on its tokens, by their weights. `tokensRead` is the number of tokens that the model read of a truncated
 * text. */
function HighlightedText({ text, tokens, weights, tokensRead }: { text: string; tokens: Token[]; weights: Map<number, number>; tokensRead?: number }) {
  const bytes = new TextEncoder().encode(text);
  const decoder = new TextDecoder();
  const most = Math.max(1e-9, ...tokens.map((token) => weights.get(token.id) ?? 0));
  const pieces: preact.ComponentChild[] = [];
  let end = 0; // of the text so far
  tokens.forEach((token, index) => {
    const weight = weights.get(token.id) ?? 0;
    const title = `token ${token.id}, weight ${weight.toFixed(4)}`;
    const markClass = `weight-${weight > 0 ? Math.max(1, scaleStep(weight, 0, most, 5)) : 0} ${tokensRead !== undefined && isTruncated(token, index, tokensRead) ? "cut" : ""}`;
    if (token.start === null || token.stop === null) {
      pieces.push(<mark class={`special ${markClass}`} title={title} data-id={token.id}>{token.text}</mark>);
      return;
    }
    if (token.start > end) pieces.push(decoder.decode(bytes.slice(end, token.start)));
    const start = Math.max(end, token.start);
    if (token.stop > start) pieces.push(<mark class={markClass} title={title} data-id={token.id}>{decoder.decode(bytes.slice(start, token.stop))}</mark>);
    end = Math.max(end, token.stop);
  });
  if (end < bytes.length) pieces.push(decoder.decode(bytes.slice(end)));
  return <p class="tokens">{pieces}</p>;
}
