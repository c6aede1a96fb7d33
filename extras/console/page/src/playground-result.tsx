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

/** The result of a model. The last reply is that to the inputs; a reply before it is that to the query. */
export function Result({ outcome, inputs }: { outcome: Outcome; inputs: NamedInput[] }) {
  const { model, calls, replies, refusal } = outcome;
  const reply = replies.at(-1);
  const call = calls.at(-1); // with the inputs
  const query = replies.length > 1 ? replies[0]?.items?.[0] : undefined;
  const titles = calls.length > 1 ? ["Query", "Documents"] : [""];
  const programs = useMemo(() => calls.map(callPrograms), [calls]);
  const samples = programs.map((callSamples, index) => <CodeSamples programs={callSamples} title={titles[index] ?? ""} />);
  if (refusal || !reply) {
    return (
      <article class="panel">
        <h2>{model.id}</h2>
        <p class="bad" role="alert">{refusal?.message}</p>
        <p class="row">
          {refusal?.requestId && <a href={href("cluster", ["requests", refusal.requestId])}>{`Status ${refusal.status}: details of this request`}</a>}
          <a href={href("models", [model.id])}>{`About ${model.id}`}</a>
        </p>
        {samples}
      </article>
    );
  }
  const denseIndices = (reply.items ?? []).flatMap((item, index) => (item.dense ? [index] : []));
  const errors = reply.items?.map((item, index) => ({ index, error: item.error })) ?? reply.scores?.map((score) => ({ index: itemIndex(score.item_id), error: score.error }));
  return (
    <article class="panel">
      <h2>{reply.model}</h2>
      <p class="dim">{summary(reply)}</p>
      {replies.flatMap((reply) => reply.warnings ?? []).map((warning) => <p class="warn">{warning}</p>)}
      {errors?.map(({ index, error }) => error && <p class="bad" role="alert">{`${index + 1} ${inputs[index]?.name ?? ""}: ${error.code} ${error.message}`}</p>)}
      {query?.error && <p class="bad" role="alert">{`query: ${query.error.code} ${query.error.message}`}</p>}
      {denseIndices.length > 0 && (
        <DenseVectors vectors={denseIndices.map((index) => reply.items?.[index]?.dense?.values ?? [])} inputs={denseIndices.map((index) => inputs[index] ?? { name: "", input: {} })} />
      )}
      {reply.items?.some((item) => item.sparse) && <SparseWeights model={model.id} reply={reply} inputs={inputs} />}
      {query?.multivector && <LateInteraction model={model} query={query} reply={reply} inputs={inputs} text={calls[0]?.body.items[0]?.text ?? ""} />}
      {query?.dense && reply.items?.map((item, index) => item.chunks && <Chunks key={index} chunks={item.chunks} query={query.dense?.values ?? []} text={call?.body.items[index]?.text ?? ""} />)}
      {reply.scores && <Scores scores={reply.scores} inputs={inputs} scale={model.score_scale} />}
      {calls[0]?.verb === "extract" && <ExtractResult reply={reply} inputs={inputs} params={calls[0].body.params ?? {}} />}
      <TokenTable reply={reply} inputs={inputs} />
      {call?.verb === "encode" && <TruncatedTexts model={model} call={call} reply={reply} inputs={inputs} />}
      <h3>Where the time went</h3>
      <Waterfall timing={reply.timing} />
      {samples}
    </article>
  );
}

/** Return the tokens, images, time, fingerprint and truncated inputs of a reply, as text. */
function summary(reply: Reply): string {
  const { total_tokens, truncated_items, images } = reply.usage;
  return [
    `${total_tokens} tokens`,
    ...(images ? [`${images} ${images === 1 ? "image" : "images"}`] : []),
    `${(reply.timing["total_time"] ?? 0).toFixed(1)} ms`,
    `fingerprint ${reply.fingerprint}`,
    ...(truncated_items.length ? [`truncated: ${truncated_items.map((index) => index + 1).join(", ")}`] : []),
  ].join(", ");
}

const SCALES: Record<string, string> = {
  probability: "A probability, from 0 to 1",
  cosine: "A cosine, at most 1",
  logit: "A logit: it has no bounds, and above 0 the document is more likely to fit",
  maxsim: "A sum over the tokens of the query: it compares documents of one query",
};

/** Return the range of the bars for the scores of a scale. A scale without bounds has a range around 0. */
function rangeOf(scale: string | null, values: number[]): [number, number] {
  const reach = Math.max(1e-9, ...values.map(Math.abs));
  const isNegative = values.some((value) => value < 0);
  if (scale === "probability" || scale === "cosine") return [isNegative ? -1 : 0, Math.max(1, reach)];
  return scale === "logit" ? [-reach, reach] : [isNegative ? -reach : 0, reach];
}

/** The scores of the documents as bars, with their scale. */
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
