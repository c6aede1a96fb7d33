import { type NamedInput, itemIndex, shorten } from "./playground-shared";
import type { Outcome } from "./playground-requests";
import { Table } from "./table";
import type { Reply, Score } from "./types";
import { cosine, cosines } from "./vectors";

/** What the answers of two models, or of two profiles of one, differ in. */
export function Comparison({ first, second, inputs }: { first: Outcome; second: Outcome; inputs: NamedInput[] }) {
  const [left, right] = [first.replies.at(-1), second.replies.at(-1)];
  if (!left || !right) return null;
  if (left.scores && right.scores) return <Ranks left={left} right={right} inputs={inputs} />;
  const [a, b] = [dense(left), dense(right)];
  return a && b ? <Vectors a={a} b={b} names={[left.model, right.model]} inputs={inputs} /> : null;
}

const dense = (reply: Reply): number[][] | undefined => {
  const vectors = reply.items?.map((item) => item.dense?.values);
  return vectors?.every((values) => values) ? (vectors as number[][]) : undefined;
};

const ranked = (scores: Score[]): Map<number, Score> => new Map(scores.filter((score) => score.score !== null).map((score) => [itemIndex(score.item_id), score]));

function Ranks({ left, right, inputs }: { left: Reply; right: Reply; inputs: NamedInput[] }) {
  const [a, b] = [ranked(left.scores ?? []), ranked(right.scores ?? [])];
  const both = [...a.entries()].flatMap(([place, score]) => {
    const second = b.get(place);
    return second ? [{ place, from: score.rank + 1, to: second.rank + 1 }] : [];
  });
  const moved = both.filter(({ from, to }) => from !== to).length;
  return (
    <article class="panel wide" id="compared">
      <h2>Ranks beside each other</h2>
      <p class="dim">{`${moved} of ${both.length} documents have another rank at ${right.model} than at ${left.model}.`}</p>
      <Table label="Ranks" class="ranks" role="group" columns={["document", { number: shorten(left.model) }, { number: shorten(right.model) }, "change"]}>
        {both.map(({ place, from, to }) => (
          <tr>
            <th scope="row" title={inputs[place]?.name}>{shorten(inputs[place]?.name ?? "", 60)}</th>
            <td class="number">{from}</td>
            <td class="number">{to}</td>
            <td class={to < from ? "good" : to > from ? "bad" : "dim"}>{to < from ? `▲ ${from - to} up` : to > from ? `▼ ${to - from} down` : "same"}</td>
          </tr>
        ))}
      </Table>
    </article>
  );
}

const SAME = 0.00005; // of a cosine: four digits are shown

function Vectors({ a, b, names, inputs }: { a: number[][]; b: number[][]; names: [string, string]; inputs: NamedInput[] }) {
  const [left, right] = [cosines(a), cosines(b)];
  const gaps = left.flatMap((row, i) => row.slice(i + 1).map((value, offset) => ({ i, j: i + 1 + offset, by: (right[i]?.[i + 1 + offset] ?? 0) - value })));
  gaps.sort((x, y) => Math.abs(y.by) - Math.abs(x.by));
  const same = a[0]?.length === b[0]?.length;
  return (
    <article class="panel wide" id="compared">
      <h2>What differs</h2>
      {gaps.length > 0 && (
        <>
          <h3>{`Pairs whose cosine differs most: ${names[1]} minus ${names[0]}`}</h3>
          {Math.abs(gaps[0]?.by ?? 0) < SAME && <p class="dim">The two agree on every pair.</p>}
          <ol class="pairs">
            {gaps.filter(({ by }) => Math.abs(by) >= SAME).slice(0, 5).map(({ i, j, by }) => <li>{`${by < 0 ? "−" : "+"}${Math.abs(by).toFixed(4)}  ${shorten(inputs[i]?.name ?? "")} · ${shorten(inputs[j]?.name ?? "")}`}</li>)}
          </ol>
        </>
      )}
      {same && (
        <>
          <h3>Cosine of the two vectors of each input, which means something for profiles of one model</h3>
          <ol class="pairs same">
            {a.map((values, place) => <li>{`${cosine(values, b[place] ?? []).toFixed(6)}  ${shorten(inputs[place]?.name ?? "")}`}</li>)}
          </ol>
        </>
      )}
    </article>
  );
}
