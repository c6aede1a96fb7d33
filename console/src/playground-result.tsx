import { useMemo } from "preact/hooks";
import { CodeSamples } from "./code-samples";
import { ExtractResult } from "./playground-extract";
import { Chunks } from "./playground-chunks";
import { LateInteraction } from "./playground-late-interaction";
import { TruncatedTexts } from "./playground-truncation";
import { type NamedInput, Bars, TokenTable, itemIndex } from "./playground-shared";
import { type Outcome, callPrograms } from "./playground-requests";
import { DenseVectors, SparseWeights } from "./playground-vectors";
import { href } from "./routes";
import type { Reply } from "./types";
import { Waterfall } from "./waterfall";

/** What a model answered, its last reply being that to the inputs; a reply before it is that to the query. */
export function Result({ outcome, inputs }: { outcome: Outcome; inputs: NamedInput[] }) {
  const { model, calls, replies, refusal } = outcome;
  const reply = replies.at(-1);
  const last = calls.at(-1);
  const query = replies.length > 1 ? replies[0]?.items?.[0] : undefined;
  const titles = calls.length > 1 ? ["Query", "Documents"] : [""];
  const written = useMemo(() => calls.map(callPrograms), [calls]);
  const copies = written.map((program, place) => <CodeSamples programs={program} title={titles[place] ?? ""} />);
  if (refusal || !reply) {
    return (
      <article class="panel">
        <h2>{model.id}</h2>
        <p class="bad" role="alert">{refusal?.message}</p>
        <p class="row">
          {refusal?.requestId && <a href={href("cluster", ["requests", refusal.requestId])}>{`Status ${refusal.status}: what is known of this request`}</a>}
          <a href={href("models", [model.id])}>{`About ${model.id}`}</a>
        </p>
        {copies}
      </article>
    );
  }
  const places = (reply.items ?? []).flatMap((item, place) => (item.dense ? [place] : []));
  const errors = reply.items?.map((item, place) => ({ place, error: item.error })) ?? reply.scores?.map((score) => ({ place: itemIndex(score.item_id), error: score.error }));
  return (
    <article class="panel">
      <h2>{reply.model}</h2>
      <p class="dim">{summary(reply)}</p>
      {replies.flatMap((reply) => reply.warnings ?? []).map((warning) => <p class="warn">{warning}</p>)}
      {errors?.map(({ place, error }) => error && <p class="bad" role="alert">{`${place + 1} ${inputs[place]?.name ?? ""}: ${error.code} ${error.message}`}</p>)}
      {query?.error && <p class="bad" role="alert">{`query: ${query.error.code} ${query.error.message}`}</p>}
      {places.length > 0 && (
        <DenseVectors vectors={places.map((place) => reply.items?.[place]?.dense?.values ?? [])} inputs={places.map((place) => inputs[place] ?? { name: "", input: {} })} />
      )}
      {reply.items?.some((item) => item.sparse) && <SparseWeights model={model.id} reply={reply} inputs={inputs} />}
      {query?.multivector && <LateInteraction model={model} query={query} reply={reply} inputs={inputs} text={calls[0]?.body.items[0]?.text ?? ""} />}
      {query?.dense && reply.items?.map((item, place) => item.chunks && <Chunks key={place} chunks={item.chunks} query={query.dense?.values ?? []} text={last?.body.items[place]?.text ?? ""} />)}
      {reply.scores && <Scores scores={reply.scores} inputs={inputs} scale={model.score_scale} />}
      {calls[0]?.verb === "extract" && <ExtractResult reply={reply} inputs={inputs} params={calls[0].body.params ?? {}} />}
      <TokenTable reply={reply} inputs={inputs} />
      {last?.verb === "encode" && <TruncatedTexts model={model} call={last} reply={reply} inputs={inputs} />}
      <h3>Where the time went</h3>
      <Waterfall timing={reply.timing} />
      {copies}
    </article>
  );
}

function summary(reply: Reply): string {
  const { total_tokens, truncated_items, images } = reply.usage;
  return [
    `${total_tokens} tokens`,
    ...(images ? [`${images} ${images === 1 ? "image" : "images"}`] : []),
    `${(reply.timing["total_time"] ?? 0).toFixed(1)} ms`,
    `fingerprint ${reply.fingerprint}`,
    ...(truncated_items.length ? [`truncated: ${truncated_items.map((place) => place + 1).join(", ")}`] : []),
  ].join(", ");
}

const SCALES: Record<string, string> = {
  probability: "A probability, from 0 to 1",
  cosine: "A cosine, at most 1",
  logit: "A logit: it has no bounds, and above 0 the document is more likely to fit",
  maxsim: "A sum over the tokens of the query: it compares documents of one query",
};

/** The range that the scores of a scale have. What has no bounds is drawn around 0. */
function rangeOf(scale: string | null, values: number[]): [number, number] {
  const reach = Math.max(1e-9, ...values.map(Math.abs));
  const isNegative = values.some((value) => value < 0);
  if (scale === "probability" || scale === "cosine") return [isNegative ? -1 : 0, Math.max(1, reach)];
  return scale === "logit" ? [-reach, reach] : [isNegative ? -reach : 0, reach];
}

function Scores({ scores, inputs, scale }: { scores: NonNullable<Reply["scores"]>; inputs: NamedInput[]; scale: string | null }) {
  const rows = scores.flatMap(({ item_id, score }) => (score === null ? [] : [{ name: inputs[itemIndex(item_id)]?.name ?? item_id, value: score }]));
  const [least, most] = rangeOf(scale, rows.map(({ value }) => value));
  return (
    <>
      <h3>Documents, best first</h3>
      <Bars label="Scores" rows={rows} least={least} most={most} />
      <p class="dim">{`${SCALES[scale ?? ""] ?? "The files of the model define the scale"}. The bars go from ${+least.toFixed(2)} to ${+most.toFixed(2)}.`}</p>
    </>
  );
}
