import { useMemo, useState } from "preact/hooks";
import { hasMarker, estimateGrid, type RowNames, rowNames } from "./late-interaction-rows";
import { type NamedInput, Bars, imageOf, shorten, scaleStep, useReply } from "./playground-shared";
import type { Model, Reply, Slot, Token } from "./types";
import { maxSim, dotProducts } from "./vectors";

/** A query against documents by late interaction: each token of the query finds its best token of the document. */
export function LateInteraction({ model, query, reply, inputs, text }: { model: Model; query: Slot; reply: Reply; inputs: NamedInput[]; text: string }) {
  const [open, setOpen] = useState(0);
  const rows = query.multivector?.values;
  const scored = useMemo(
    () => (reply.items ?? []).map((item) => (rows && item.multivector ? dotProducts(rows, item.multivector.values) : undefined)).map((map) => map && { map, ...maxSim(map) }),
    [rows, reply],
  );
  const names = useTokens(model, [text], "query");
  const documents = useTokens(model, inputs.map((entry) => entry.input.text ?? ""), "document");
  const order = scored.flatMap((entry, place) => (entry ? [{ place, sum: entry.sum }] : [])).sort((a, b) => b.sum - a.sum);
  const shown = scored[open] ? open : (order[0]?.place ?? -1);
  const score = scored[shown];
  const item = reply.items?.[shown];
  if (!score || !item?.multivector) return null;
  const marked = (reply.items ?? []).some((item, place) => hasMarker(documents?.[place], item.usage));
  const ofQuery = rowNames(names?.[0], score.map.length, "query", marked, query.usage);
  const picture = imageOf(inputs[shown]?.input);
  const ofDocument = picture ? undefined : rowNames(documents?.[shown], item.multivector.num_tokens, "document", marked, item.usage);
  return (
    <>
      <h3>Documents, best first: MaxSim with the query</h3>
      <Bars label="MaxSim" least={Math.min(0, ...order.map(({ sum }) => sum))} most={Math.max(score.map.length, ...order.map(({ sum }) => sum))} rows={order.map(({ place, sum }) => ({ name: inputs[place]?.name ?? "", value: sum }))} />
      {order.length > 1 && (
        <label>
          Document
          <select class="document" value={shown} onChange={(event) => setOpen(Number(event.currentTarget.value))}>
            {order.map(({ place }) => <option value={place}>{`${place + 1} ${shorten(inputs[place]?.name ?? "", 60)}`}</option>)}
          </select>
        </label>
      )}
      {picture
        ? <Patches key={shown} model={model.id} map={score.map} best={score.best} names={ofQuery.names} picture={picture} name={inputs[shown]?.name ?? ""} />
        : ofDocument && <Tokens map={score.map} best={score.best} query={ofQuery} document={ofDocument} />}
      <Best best={score.best} query={ofQuery} names={ofDocument?.names} sum={score.sum} />
    </>
  );
}

/** The tokens of texts, under the prompt that their side has. None for a text that is empty. */
function useTokens(model: Model, texts: string[], side: "query" | "document"): Token[][] | undefined {
  const prompt = model.prompts?.includes(side) ? { prompt_name: side } : {};
  const filled = texts.filter(Boolean);
  const { value } = useReply<Token[][]>(filled.length ? `/tei/${model.id}/tokenize` : "", { inputs: filled, ...prompt });
  let at = 0;
  return value && texts.map((text) => (text ? (value[at++] ?? []) : []));
}

type Best = { at: number; value: number }[];

function Best({ best, query, names, sum }: { best: Best; query: RowNames; names?: string[]; sum: number }) {
  return (
    <details>
      <summary>Best match of each query token</summary>
      <div class="scroll" tabIndex={0} role="group" aria-label="Best matches">
        <table class="best">
          <thead><tr><th scope="col">query</th><th scope="col">document</th><th scope="col" class="number">product</th></tr></thead>
          <tbody>
            {best.map(({ at, value }, row) => (
              <tr><th scope="row">{query.names[row]}</th><td>{names?.[at] ?? `row ${at + 1}`}</td><td class="number">{value.toFixed(4)}</td></tr>
            ))}
          </tbody>
          <tfoot><tr><th scope="row">sum</th><td /><td class="number">{sum.toFixed(4)}</td></tr></tfoot>
        </table>
      </div>
    </details>
  );
}

const range = (map: number[][]): [number, number] => {
  let [least, most] = [Infinity, -Infinity]; // a long document has more cells than a call may have arguments
  for (const row of map) for (const value of row) [least, most] = [Math.min(least, value), Math.max(most, value)];
  return [least, most];
};

function Tokens({ map, best, query, document }: { map: number[][]; best: Best; query: RowNames; document: RowNames }) {
  const [least, most] = range(map);
  return (
    <>
      <h3>Each token of the query (rows) with each of the document (columns)</h3>
      <div class="scroll late" tabIndex={0} role="group" aria-label="Products of tokens">
        <table class="heat">
          <thead>
            <tr><th scope="col" class="number">MaxSim</th>{document.names.map((name) => <th scope="col" title={name}>{shorten(name, 12)}</th>)}</tr>
          </thead>
          <tbody>
            {map.map((row, i) => (
              <tr>
                <th scope="row"><span class="named">{shorten(query.names[i] ?? "", 14)}<span class="number">{best[i]?.value.toFixed(2)}</span></span></th>
                {row.map((value, j) => (
                  <td class={`heat-${scaleStep(value, least, most, 10)} ${best[i]?.at === j ? "best" : ""}`}>{value.toFixed(2)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {(!query.known || !document.known) && (
        <p class="dim">{`The rows of the ${query.known ? "document" : document.known ? "query" : "query and the document"} could not be told from the tokens of the text, so they have numbers.`}</p>
      )}
    </>
  );
}

/** The patches of an image, by their product with one token of the query or the largest with any. */
function Patches(props: { model: string; map: number[][]; best: Best; names: string[]; picture: string; name: string }) {
  const { map } = props;
  const [token, setToken] = useState(-1);
  const [size, setSize] = useState<[number, number]>([0, 0]);
  const count = map[0]?.length ?? 0;
  const likely = estimateGrid(props.model, count, ...size);
  const [own, setOwn] = useState<Partial<typeof likely>>({});
  const { across, down, first } = { ...likely, ...own };
  const values = Array.from({ length: across * down }, (_, place) =>
    token < 0 ? Math.max(...map.map((row) => row[first + place] ?? -Infinity)) : (map[token]?.[first + place] ?? -Infinity),
  );
  const fits = first + across * down <= count;
  const [least, most] = range([values]);
  const field = (name: "across" | "down" | "first", label: string, min: number) => (
    <label>
      {label}
      <input
        type="number" min={min} max={count} value={{ across, down, first }[name]} data-grid={name}
        onInput={(event) => setOwn({ ...own, [name]: Math.max(min, Math.min(count, Math.round(Number(event.currentTarget.value) || min))) })}
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
            {props.names.map((name, place) => <option value={place}>{`${place + 1} ${name} (${props.best[place]?.value.toFixed(3)})`}</option>)}
          </select>
        </label>
        {field("across", "Across", 1)}
        {field("down", "Down", 1)}
        {field("first", "Rows before", 0)}
      </div>
      <div class="picture">
        <img src={props.picture} alt={props.name} onLoad={(event) => setSize([event.currentTarget.naturalWidth, event.currentTarget.naturalHeight])} />
        {fits && (
          <svg class="patches" viewBox={`0 0 ${across} ${down}`} preserveAspectRatio="none" role="img" aria-label={`${across} by ${down} patches`}>
            {values.map((value, place) => (
              <rect x={place % across} y={Math.floor(place / across)} width="1" height="1" fill-opacity={(0.85 * (value - least)) / (most - least || 1)}>
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
