import { useMemo, useState } from "preact/hooks";
import { hasMarker, estimateGrid, type RowNames, rowNames } from "./late-interaction-rows";
import { type NamedInput, Bars, imageOf, shorten, scaleStep, useReply } from "./playground-shared";
import type { ItemResult, Model, Reply, Token } from "./types";
import { maxSim, dotProducts } from "./vectors";

/** A query against documents by late interaction: each token of the query is matched with its best token of the document. */
export function LateInteraction({ model, query, reply, inputs, text }: { model: Model; query: ItemResult; reply: Reply; inputs: NamedInput[]; text: string }) {
  const [chosen, setChosen] = useState(0);
  const rows = query.multivector?.values;
  const scored = useMemo(
    () => (reply.items ?? []).map((item) => (rows && item.multivector ? dotProducts(rows, item.multivector.values) : undefined)).map((matrix) => matrix && { matrix, ...maxSim(matrix) }),
    [rows, reply],
  );
  const queryTokens = useTokens(model, [text], "query");
  const documentTokens = useTokens(model, inputs.map((entry) => entry.input.text ?? ""), "document");
  const order = scored.flatMap((entry, index) => (entry ? [{ index, sum: entry.sum }] : [])).sort((a, b) => b.sum - a.sum);
  const shown = scored[chosen] ? chosen : (order[0]?.index ?? -1);
  const score = scored[shown];
  const item = reply.items?.[shown];
  if (!score || !item?.multivector) return null;
  const isMarked = (reply.items ?? []).some((item, index) => hasMarker(documentTokens?.[index], item.usage));
  const queryRows = rowNames(queryTokens?.[0], score.matrix.length, "query", isMarked, query.usage);
  const picture = imageOf(inputs[shown]?.input);
  const documentRows = picture ? undefined : rowNames(documentTokens?.[shown], item.multivector.num_tokens, "document", isMarked, item.usage);
  return (
    <>
      <h3>Documents, best first: MaxSim with the query</h3>
      <Bars label="MaxSim" least={Math.min(0, ...order.map(({ sum }) => sum))} most={Math.max(score.matrix.length, ...order.map(({ sum }) => sum))} rows={order.map(({ index, sum }) => ({ name: inputs[index]?.name ?? "", value: sum }))} />
      {order.length > 1 && (
        <label>
          Document
          <select class="document" value={shown} onChange={(event) => setChosen(Number(event.currentTarget.value))}>
            {order.map(({ index }) => <option value={index}>{`${index + 1} ${shorten(inputs[index]?.name ?? "", 60)}`}</option>)}
          </select>
        </label>
      )}
      {picture
        ? <Patches key={shown} model={model.id} matrix={score.matrix} best={score.best} names={queryRows.names} picture={picture} name={inputs[shown]?.name ?? ""} />
        : documentRows && <TokenProducts matrix={score.matrix} best={score.best} query={queryRows} document={documentRows} />}
      <BestMatches best={score.best} query={queryRows} names={documentRows?.names} sum={score.sum} />
    </>
  );
}

/** The tokens of texts with the prompt of a side. An empty text has no tokens. */
function useTokens(model: Model, texts: string[], side: "query" | "document"): Token[][] | undefined {
  const prompt = model.prompts?.includes(side) ? { prompt_name: side } : {};
  const nonEmpty = texts.filter(Boolean);
  const { value } = useReply<Token[][]>(nonEmpty.length ? `/tei/${model.id}/tokenize` : "", { inputs: nonEmpty, ...prompt });
  let next = 0;
  return value && texts.map((text) => (text ? (value[next++] ?? []) : []));
}

type BestRows = { index: number; value: number }[]; // of the document, one for each row of the query

/** The best match of each token of the query, as a table. */
function BestMatches({ best, query, names, sum }: { best: BestRows; query: RowNames; names?: string[]; sum: number }) {
  return (
    <details>
      <summary>Best match of each query token</summary>
      <div class="scroll" tabIndex={0} role="group" aria-label="Best matches">
        <table class="best">
          <thead><tr><th scope="col">query</th><th scope="col">document</th><th scope="col" class="number">product</th></tr></thead>
          <tbody>
            {best.map(({ index, value }, row) => (
              <tr><th scope="row">{query.names[row]}</th><td>{names?.[index] ?? `row ${index + 1}`}</td><td class="number">{value.toFixed(4)}</td></tr>
            ))}
          </tbody>
          <tfoot><tr><th scope="row">sum</th><td /><td class="number">{sum.toFixed(4)}</td></tr></tfoot>
        </table>
      </div>
    </details>
  );
}

/** Return the least and the largest value of a matrix. */
const rangeOf = (matrix: number[][]): [number, number] => {
  let [least, most] = [Infinity, -Infinity]; // no call of Math.min: a long document has more cells than a call may have arguments
  for (const row of matrix) for (const value of row) [least, most] = [Math.min(least, value), Math.max(most, value)];
  return [least, most];
};

/** The products of each token of the query with each token of the document. */
function TokenProducts({ matrix, best, query, document }: { matrix: number[][]; best: BestRows; query: RowNames; document: RowNames }) {
  const [least, most] = rangeOf(matrix);
  return (
    <>
      <h3>Each token of the query (rows) with each of the document (columns)</h3>
      <div class="scroll late" tabIndex={0} role="group" aria-label="Products of tokens">
        <table class="heat">
          <thead>
            <tr><th scope="col" class="number">MaxSim</th>{document.names.map((name) => <th scope="col" title={name}>{shorten(name, 12)}</th>)}</tr>
          </thead>
          <tbody>
            {matrix.map((row, i) => (
              <tr>
                <th scope="row"><span class="named">{shorten(query.names[i] ?? "", 14)}<span class="number">{best[i]?.value.toFixed(2)}</span></span></th>
                {row.map((value, j) => (
                  <td class={`heat-${scaleStep(value, least, most, 10)} ${best[i]?.index === j ? "best" : ""}`}>{value.toFixed(2)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {(!query.isCertain || !document.isCertain) && (
        <p class="dim">{`The rows of the ${query.isCertain ? "document" : document.isCertain ? "query" : "query and the document"} do not match the tokens of the text, so they have numbers.`}</p>
      )}
    </>
  );
}

/** The patches of an image, coloured by their product with one token of the query, or by their largest product with any. */
function Patches(props: { model: string; matrix: number[][]; best: BestRows; names: string[]; picture: string; name: string }) {
  const { matrix } = props;
  const [token, setToken] = useState(-1);
  const [size, setSize] = useState<[number, number]>([0, 0]);
  const count = matrix[0]?.length ?? 0;
  const estimate = estimateGrid(props.model, count, ...size);
  const [edits, setEdits] = useState<Partial<typeof estimate>>({});
  const { across, down, first } = { ...estimate, ...edits };
  const values = Array.from({ length: across * down }, (_, index) =>
    token < 0 ? Math.max(...matrix.map((row) => row[first + index] ?? -Infinity)) : (matrix[token]?.[first + index] ?? -Infinity),
  );
  const fits = first + across * down <= count;
  const [least, most] = rangeOf([values]);
  const field = (name: "across" | "down" | "first", label: string, min: number) => (
    <label>
      {label}
      <input
        type="number" min={min} max={count} value={{ across, down, first }[name]} data-grid={name}
        onInput={(event) => setEdits({ ...edits, [name]: Math.max(min, Math.min(count, Math.round(Number(event.currentTarget.value) || min))) })}
      />
    </label>
  );
  return (
    <>
      <h3>Patches of the image</h3>
      <div class="row">
        <label>
          Query token
          <select class="token" value={token} onChange={(event) => setToken(Number(event.currentTarget.value))}>
            <option value={-1}>the best of all</option>
            {props.names.map((name, index) => <option value={index}>{`${index + 1} ${name} (${props.best[index]?.value.toFixed(3)})`}</option>)}
          </select>
        </label>
        {field("across", "Across", 1)}
        {field("down", "Down", 1)}
        {field("first", "Rows before the patches", 0)}
      </div>
      <div class="picture">
        <img src={props.picture} alt={props.name} onLoad={(event) => setSize([event.currentTarget.naturalWidth, event.currentTarget.naturalHeight])} />
        {fits && (
          <svg class="patches" viewBox={`0 0 ${across} ${down}`} preserveAspectRatio="none" role="img" aria-label={`${across} by ${down} patches`}>
            {values.map((value, index) => (
              <rect x={index % across} y={Math.floor(index / across)} width="1" height="1" fill-opacity={(0.85 * (value - least)) / (most - least || 1)}>
                <title>{value.toFixed(4)}</title>
              </rect>
            ))}
          </svg>
        )}
      </div>
      <p class={fits ? "dim" : "warn"}>
        {fits ? `The reply has ${count} rows and does not say which patch a row is: ${across} by ${down} patches behind ${first} rows are assumed.` : `${across} by ${down} patches behind ${first} rows are more than the ${count} rows.`}
      </p>
    </>
  );
}
