import { useEffect, useMemo, useState } from "preact/hooks";
import { asCurl, ask, asPython, asTypeScript, Refusal, type Sent } from "./api";
import type { Entity, Model, Reply } from "./types";
import { cosines, norm, projected } from "./vectors";
import { Waterfall } from "./waterfall";

type Verb = "encode" | "score" | "extract";
const EXAMPLES: Record<Verb, string> = {
  encode: "The cat sits on the mat.\nA kitten rests on a rug.\nStocks fell sharply today.\nThe market lost ground.",
  score: "Paris is the capital of France.\nBerlin is the capital of Germany.\nBread is made of flour.",
  extract: "Ada Lovelace met Charles Babbage in London in 1833.",
};
const DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2";
const MOST = 64; // inputs of which every pair is drawn

interface Outcome {
  sent: Sent;
  reply?: Reply;
  refusal?: Refusal;
}

export function Playground({ models }: { models: Model[] }) {
  const [verb, choose] = useState<Verb>("encode");
  // what is loaded answers at once; the default model is the next best to begin with
  const fitting = useMemo(() => {
    const rank = (model: Model): number => (model.state === "loaded" ? 0 : model.id === DEFAULT_MODEL ? 1 : 2);
    return models.filter((model) => model.tasks.includes(verb)).sort((a, b) => rank(a) - rank(b));
  }, [models, verb]);
  const [first, setFirst] = useState("");
  const [second, setSecond] = useState("");
  const [text, setText] = useState(EXAMPLES.encode);
  const [query, setQuery] = useState("What is the capital of France?");
  const [labels, setLabels] = useState("person, place, date");
  const [output, setOutput] = useState("dense");
  const [outcomes, setOutcomes] = useState<Outcome[]>([]);
  const [asked, setAsked] = useState<string[]>([]);
  const [running, setRunning] = useState(false);

  useEffect(() => {
    setFirst((old) => (fitting.some((model) => model.id === old) ? old : (fitting[0]?.id ?? "")));
    setSecond((old) => (fitting.some((model) => model.id === old) ? old : ""));
  }, [fitting]);
  const outputs = (fitting.find((model) => model.id === first)?.outputs ?? []).filter((name) => name === "dense" || name === "sparse");

  async function run(event: Event) {
    event.preventDefault();
    const texts = text.split("\n").map((line) => line.trim()).filter(Boolean).slice(0, MOST);
    setRunning(true);
    setAsked(texts);
    const wanted = [first, ...(second ? [second] : [])].map((model): Sent => {
      const items = texts.map((each) => ({ text: each }));
      const body =
        verb === "encode" ? { items, params: { output_types: [outputs.some((name) => name === output) ? output : (outputs[0] ?? "dense")] } }
        : verb === "score" ? { query: { text: query }, items }
        : { items, params: { labels: labels.split(",").map((label) => label.trim()).filter(Boolean) } };
      return { method: "POST", path: `/v1/${verb}/${model}`, body, explain: true };
    });
    setOutcomes(
      await Promise.all(
        wanted.map(async (sent): Promise<Outcome> => {
          try {
            return { sent, reply: await ask<Reply>(sent) };
          } catch (error) {
            if (error instanceof Refusal) return { sent, refusal: error };
            throw error;
          }
        }),
      ),
    );
    setRunning(false);
  }

  function change(next: Verb) {
    choose(next);
    setText(EXAMPLES[next]);
    setOutcomes([]);
  }

  return (
    <section>
      <form class="panel" onSubmit={run}>
        <div class="row" role="radiogroup" aria-label="Verb">
          {(["encode", "score", "extract"] as Verb[]).map((each) => (
            <label class={`chip ${each === verb ? "on" : ""}`}>
              <input type="radio" name="verb" checked={each === verb} onChange={() => change(each)} />
              {each}
            </label>
          ))}
        </div>
        <div class="row">
          <Choice id="model" label="Model" models={fitting} value={first} onChange={setFirst} />
          <Choice id="beside" label="Beside it" models={fitting} value={second} onChange={setSecond} none="(nothing)" />
          {verb === "encode" && outputs.length > 1 && (
            <label>
              Output
              <select id="output" value={output} onChange={(event) => setOutput(event.currentTarget.value)}>
                {outputs.map((name) => <option value={name}>{name}</option>)}
              </select>
            </label>
          )}
        </div>
        {verb === "score" && (
          <label>
            Query
            <input id="query" value={query} onInput={(event) => setQuery(event.currentTarget.value)} />
          </label>
        )}
        {verb === "extract" && (
          <label>
            Labels, with commas between
            <input id="labels" value={labels} onInput={(event) => setLabels(event.currentTarget.value)} />
          </label>
        )}
        <label>
          {verb === "score" ? "Documents, one a line" : "Texts, one a line"}
          <textarea id="texts" rows={6} value={text} onInput={(event) => setText(event.currentTarget.value)} />
        </label>
        <button id="run" type="submit" disabled={running || !first || !text.trim()}>
          {running ? "Running" : "Run"}
        </button>
        {!fitting.length && <p class="dim">No model of the catalogue can {verb}.</p>}
      </form>
      <div class="beside" aria-live="polite">
        {outcomes.map((outcome) => <Result outcome={outcome} texts={asked} />)}
      </div>
    </section>
  );
}

function Choice(given: { id: string; label: string; models: Model[]; value: string; onChange: (id: string) => void; none?: string }) {
  return (
    <label>
      {given.label}
      <select id={given.id} value={given.value} onChange={(event) => given.onChange(event.currentTarget.value)}>
        {given.none && <option value="">{given.none}</option>}
        {given.models.map((model) => <option value={model.id}>{model.id}</option>)}
      </select>
    </label>
  );
}

function Result({ outcome, texts }: { outcome: Outcome; texts: string[] }) {
  const { sent, reply, refusal } = outcome;
  if (refusal || !reply) {
    return (
      <article class="panel">
        <p class="bad" role="alert">{`${refusal?.code} ${refusal?.message}`}</p>
        <p class="dim">{`status ${refusal?.status}, request ${refusal?.requestId}`}</p>
        <Copies sent={sent} />
      </article>
    );
  }
  const dense = reply.items?.map((item) => item.dense?.values as number[] | undefined);
  return (
    <article class="panel">
      <h2>{reply.model}</h2>
      <p class="dim">
        {`${reply.usage.total_tokens} tokens, ${(reply.timing["total_time"] ?? 0).toFixed(1)} ms, fingerprint ${reply.fingerprint}`}
        {reply.usage.truncated_items.length > 0 && `, truncated: ${reply.usage.truncated_items.map((place) => place + 1).join(", ")}`}
      </p>
      {reply.warnings?.map((warning) => <p class="warn">{warning}</p>)}
      {reply.items?.map((item, place) => item.error && <p class="bad">{`${place + 1}: ${item.error.code} ${item.error.message}`}</p>)}
      {dense?.every((vector) => vector) && <Dense vectors={dense as number[][]} texts={texts} />}
      {reply.items?.some((item) => item.sparse) && <Sparse reply={reply} texts={texts} />}
      {reply.scores && <Scores scores={reply.scores} texts={texts} />}
      {reply.items?.some((item) => item.entities) && <Spans reply={reply} texts={texts} />}
      <h3>Where the time went</h3>
      <Waterfall timing={reply.timing} />
      <Copies sent={sent} />
    </article>
  );
}

function Copies({ sent }: { sent: Sent }) {
  const [copied, setCopied] = useState("");
  const kinds: [string, string][] = [["curl", asCurl(sent)], ["Python", asPython(sent)], ["TypeScript", asTypeScript(sent)]];
  return (
    <div class="row copies">
      {kinds.map(([name, code]) => (
        <details>
          <summary>{name}</summary>
          <button type="button" onClick={() => navigator.clipboard.writeText(code).then(() => setCopied(name), () => setCopied(""))}>
            {copied === name ? "Copied" : `Copy as ${name}`}
          </button>
          <pre class="code" data-kind={name}>{code}</pre>
        </details>
      ))}
    </div>
  );
}

const short = (text: string): string => (text.length > 40 ? `${text.slice(0, 39)}…` : text);

function Dense({ vectors, texts }: { vectors: number[][]; texts: string[] }) {
  const matrix = useMemo(() => cosines(vectors), [vectors]);
  const points = useMemo(() => projected(vectors), [vectors]);
  const reach = Math.max(1e-9, ...points.flat().map(Math.abs));
  const pairs = matrix
    .flatMap((row, i) => row.slice(i + 1).map((value, offset) => ({ i, j: i + 1 + offset, value })))
    .sort((a, b) => b.value - a.value)
    .slice(0, 5);
  return (
    <>
      <p>{`${vectors[0]?.length} dimensions, norms ${Math.min(...vectors.map(norm)).toFixed(3)} to ${Math.max(...vectors.map(norm)).toFixed(3)}`}</p>
      <div class="views">
      <div>
      <h3>Cosine of all against all</h3>
      <div class="scroll" tabIndex={0} role="region" aria-label="Cosines">
        <table class="heat">
          <tbody>
            {matrix.map((row, i) => (
              <tr>
                <th scope="row" title={texts[i]}>{`${i + 1} ${short(texts[i] ?? "")}`}</th>
                {row.map((value, j) => (
                  <td class={`heat-${Math.max(0, Math.min(10, Math.round(value * 10)))}`} title={`${i + 1} and ${j + 1}`}>{value.toFixed(2)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {pairs.length > 0 && (
        <>
          <h3>Nearest pairs</h3>
          <ol class="pairs">
            {pairs.map(({ i, j, value }) => <li>{`${value.toFixed(4)}  ${short(texts[i] ?? "")} · ${short(texts[j] ?? "")}`}</li>)}
          </ol>
        </>
      )}
      </div>
      {pairs.length > 0 && (
        <div>
          <h3>Two principal components</h3>
          <svg class="points" viewBox="-1.2 -1.2 2.4 2.4" role="img" aria-label="The inputs on the plane of their two principal components">
            {points.map(([x, y], place) => (
              <g>
                <title>{texts[place]}</title>
                <circle cx={x / reach} cy={-y / reach} r="0.03" />
                <text x={x / reach + 0.05} y={-y / reach + 0.03} font-size="0.09">{place + 1}</text>
              </g>
            ))}
          </svg>
        </div>
      )}
      </div>
    </>
  );
}

function Sparse({ reply, texts }: { reply: Reply; texts: string[] }) {
  return (
    <>
      {reply.items?.map((item, place) => {
        const { indices = [], values = [] } = item.sparse ?? {};
        const weights = indices.map((id, at): [number, number] => [id, values[at] ?? 0]).sort((a, b) => b[1] - a[1]);
        return (
          <>
            <h3>{`${short(texts[place] ?? "")} (${indices.length} weights)`}</h3>
            <Bars rows={weights.slice(0, 12).map(([id, weight]) => [`token ${id}`, weight])} />
          </>
        );
      })}
    </>
  );
}

function Bars({ rows }: { rows: [string, number][] }) {
  const least = Math.min(0, ...rows.map(([, value]) => value));
  const most = Math.max(...rows.map(([, value]) => value), least + 1e-9);
  return (
    <table class="bars">
      <tbody>
        {rows.map(([name, value]) => (
          <tr>
            <th scope="row" title={name}>{name}</th>
            <td><meter min={least} max={most} value={value} aria-label={name} /></td>
            <td class="number">{value.toFixed(4)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Scores({ scores, texts }: { scores: NonNullable<Reply["scores"]>; texts: string[] }) {
  const place = (id: string): number => Number(id.replace("item-", ""));
  return (
    <>
      <h3>Documents, best first</h3>
      <Bars rows={scores.map((each) => [texts[place(each.item_id)] ?? each.item_id, each.score])} />
    </>
  );
}

/** Pieces of a text: those that are in an entity, and those between. Of entities that overlap the first is drawn. Places
 * are code points. */
export function pieces(text: string, entities: Entity[]): { text: string; entity?: Entity }[] {
  const points = [...text];
  const found: { text: string; entity?: Entity }[] = [];
  let at = 0;
  for (const entity of [...entities].sort((a, b) => a.start - b.start)) {
    if (entity.start < at) continue;
    if (entity.start > at) found.push({ text: points.slice(at, entity.start).join("") });
    found.push({ text: points.slice(entity.start, entity.end).join(""), entity });
    at = entity.end;
  }
  if (at < points.length) found.push({ text: points.slice(at).join("") });
  return found;
}

function Spans({ reply, texts }: { reply: Reply; texts: string[] }) {
  return (
    <>
      {reply.items?.map((item, place) => (
        <p class="spans">
          {pieces(texts[place] ?? "", item.entities ?? []).map((piece) =>
            piece.entity ? (
              <mark title={piece.entity.score.toFixed(4)}>{piece.text}<small>{piece.entity.label}</small></mark>
            ) : (
              piece.text
            ),
          )}
        </p>
      ))}
    </>
  );
}
