import { type NamedInput, itemIndex, shorten } from "./playground-shared";
import type { Outcome } from "./playground-requests";
import { Table } from "./table";
import type { Reply, Score } from "./types";
import { cosine, cosines } from "./vectors";

/** The differences between the answers of two models, or of two profiles of a model. */
export function Comparison({ first, second, inputs }: { first: Outcome; second: Outcome; inputs: NamedInput[] }) {
  const [left, right] = [first.replies.at(-1), second.replies.at(-1)];
  if (!left || !right) return null;
  if (left.scores && right.scores) return <RankDifferences left={left} right={right} inputs={inputs} />;
  const [a, b] = [denseVectors(left), denseVectors(right)];
  return a && b ? <VectorDifferences a={a} b={b} names={[left.model, right.model]} inputs={inputs} /> : null;
}

/** Return the dense vectors of a reply, undefined unless each item has one. */
const denseVectors = (reply: Reply): number[][] | undefined => {
  const vectors = reply.items?.map((item) => item.dense?.values);
  return vectors?.every((values) => values) ? (vectors as number[][]) : undefined;
};

const scoresByInput = (scores: Score[]): Map<number, Score> => new Map(scores.filter((score) => score.score !== null).map((score) => [itemIndex(score.item_id), score]));

/** The ranks of each document at two models. */
function RankDifferences({ left, right, inputs }: { left: Reply; right: Reply; inputs: NamedInput[] }) {
  const [a, b] = [scoresByInput(left.scores ?? []), scoresByInput(right.scores ?? [])];
  const both = [...a.entries()].flatMap(([index, score]) => {
    const second = b.get(index);
    return second ? [{ index, from: score.rank + 1, to: second.rank + 1 }] : [];
  });
  const moved = both.filter(({ from, to }) => from !== to).length;
  return (
    <article class="panel wide" id="compared">
      <h2>Ranks beside each other</h2>
      <p class="dim">{`${moved} of ${both.length} documents have another rank at ${right.model} than at ${left.model}.`}</p>
      <Table label="Ranks" class="ranks" role="group" columns={["document", { number: shorten(left.model) }, { number: shorten(right.model) }, "change"]}>
        {both.map(({ index, from, to }) => (
          <tr>
            <th scope="row" title={inputs[index]?.name}>{shorten(inputs[index]?.name ?? "", 60)}</th>
            <td class="number">{from}</td>
            <td class="number">{to}</td>
            <td class={to < from ? "good" : to > from ? "bad" : "dim"}>{to < from ? `▲ ${from - to} up` : to > from ? `▼ ${to - from} down` : "same"}</td>
          </tr>
        ))}
      </Table>
    </article>
  );
}

const EQUAL_BELOW = 0.00005; // the page shows four digits of a cosine

/** The pairs of inputs whose cosine differs most, and the cosines of the two vectors of each input. */
function VectorDifferences({ a, b, names, inputs }: { a: number[][]; b: number[][]; names: [string, string]; inputs: NamedInput[] }) {
  const [left, right] = [cosines(a), cosines(b)];
  const differences = left.flatMap((row, i) => row.slice(i + 1).map((value, offset) => ({ i, j: i + 1 + offset, by: (right[i]?.[i + 1 + offset] ?? 0) - value })));
  differences.sort((x, y) => Math.abs(y.by) - Math.abs(x.by));
  const hasSameWidth = a[0]?.length === b[0]?.length;
  return (
    <article class="panel wide" id="compared">
      <h2>What differs</h2>
      {differences.length > 0 && (
        <>
          <h3>{`Pairs whose cosine differs most: ${names[1]} minus ${names[0]}`}</h3>
          {Math.abs(differences[0]?.by ?? 0) < EQUAL_BELOW && <p class="dim">The two agree on every pair.</p>}
          <ol class="pairs">
            {differences.filter(({ by }) => Math.abs(by) >= EQUAL_BELOW).slice(0, 5).map(({ i, j, by }) => <li>{`${by < 0 ? "−" : "+"}${Math.abs(by).toFixed(4)}  ${shorten(inputs[i]?.name ?? "")} · ${shorten(inputs[j]?.name ?? "")}`}</li>)}
          </ol>
        </>
      )}
      {hasSameWidth && (
        <>
          <h3>Cosine of the two vectors of each input, meaningful for profiles of one model</h3>
          <ol class="pairs same">
            {a.map((values, index) => <li>{`${cosine(values, b[index] ?? []).toFixed(6)}  ${shorten(inputs[index]?.name ?? "")}`}</li>)}
          </ol>
        </>
      )}
    </article>
  );
}
