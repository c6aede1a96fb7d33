/** What a request may say beside its inputs: controls for what people use, JSON for the rest. */

import { complaint, parsed } from "./json-map";
import type { Verb } from "./playground-requests";
import type { Model } from "./types";

const OUTPUTS = ["dense", "sparse", "multivector"];
const OUTPUT_WORDS: Record<string, string> = { dense: "dense", sparse: "sparse", multivector: "a vector for each token" };

// the vector that a MUVERA profile makes of a multivector is among its widths alone
export const outputsOf = (model: Model | undefined): string[] =>
  OUTPUTS.filter((name) => model && (model.outputs.includes(name) || name in model.dims));

/** What is set. An empty text leaves it to the model. */
export const UNSET = { output: "dense", side: "document", chunks: "", context: "true", dimensions: "", threshold: "", lora: "", json: "", metadata: "" };
export type Settings = typeof UNSET & { labels?: string };

/** The labels of a request: those that were typed, else an example for a model that needs some. */
const labelsOf = ({ labels }: Settings, model: Model | undefined): string => labels ?? (model?.needs_labels ? "person, place, date" : "");

export const outputOf = ({ output }: Settings, model: Model | undefined): string => {
  const own = outputsOf(model);
  return own.includes(output) ? output : (own[0] ?? "dense");
};

export const isLate = (verb: Verb, settings: Settings, model: Model | undefined): boolean => verb === "encode" && outputOf(settings, model) === "multivector";

/** Whether a text is one document that is encoded in chunks. */
export const isChunked = (verb: Verb, settings: Settings, model: Model | undefined): boolean =>
  verb === "encode" && outputOf(settings, model) === "dense" && Boolean(settings.chunks) && Boolean(model?.inputs.includes("text"));

export const complaintsOf = (verb: Verb, { json, metadata, threshold, chunks }: Settings): { json: string; metadata: string; threshold: string; chunks: string } => ({
  chunks: verb === "encode" && chunks && !/^[1-9]\d{0,4}$/.test(chunks) ? "A chunk has a whole number of tokens." : "",
  json: complaint(json),
  metadata: verb === "extract" ? complaint(metadata) : "",
  threshold: verb === "extract" && threshold && !(Number(threshold) >= 0 && Number(threshold) <= 1) ? "A threshold is from 0 to 1." : "",
});

/** The parameters of a request to a model. What is written as JSON comes last. */
export function paramsOf(verb: Verb, settings: Settings, model: Model): Record<string, unknown> {
  const { side, dimensions, threshold, lora, json } = settings;
  const output = outputOf(settings, model);
  const named = labelsOf(settings, model).split(",").map((label) => label.trim()).filter(Boolean);
  const takesWidth = output === "dense" && model.matryoshka_dims?.includes(Number(dimensions));
  const own = {
    encode: {
      output_types: [output],
      ...(side === "query" && output !== "multivector" && !isChunked(verb, settings, model) ? { is_query: true } : {}),
      ...(takesWidth ? { dimensions: Number(dimensions) } : {}),
    },
    score: {},
    extract: { ...(named.length ? { labels: named } : {}), ...(threshold ? { threshold: Number(threshold) } : {}) },
  }[verb];
  return { ...own, ...(lora.trim() && model.supports_lora ? { lora_id: lora.trim() } : {}), ...(parsed(json) ?? {}) };
}

type Set = (name: keyof Settings, value: string) => void;

interface Props {
  verb: Verb;
  settings: Settings;
  set: Set;
  /** Before the ids of the fields. */
  prefix?: string;
}

export function Controls({ verb, model, settings, set, prefix = "" }: Props & { model: Model | undefined }) {
  const outputs = outputsOf(model);
  const output = outputOf(settings, model);
  const wrong = complaintsOf(verb, settings);
  const choice = (name: keyof Settings, label: string, options: [string, string][], value = settings[name]) => (
    <label>
      {label}
      <select id={prefix + name} value={value} onChange={(event) => set(name, event.currentTarget.value)}>
        {options.map(([each, words]) => <option value={each}>{words}</option>)}
      </select>
    </label>
  );
  const loras = Object.values(model?.profiles ?? {}).flatMap((each) => (each.lora_id ? [each.lora_id] : []));
  const widths = model?.matryoshka_dims ?? [];
  return (
    <>
      <div class="row controls">
        {verb === "encode" && outputs.length > 1 && choice("output", "Output", outputs.map((name) => [name, OUTPUT_WORDS[name] ?? name]), output)}
        {verb === "encode" && output === "dense" && !prefix && model?.inputs.includes("text") && (
          <label>
            Chunks, most tokens
            <input id="chunks" type="number" min={1} value={settings.chunks} placeholder="none" aria-invalid={Boolean(wrong.chunks)} onInput={(event) => set("chunks", event.currentTarget.value)} />
          </label>
        )}
        {isChunked(verb, settings, model) && choice("context", "Context", [["true", "whole document"], ["false", "each chunk alone"]])}
        {verb === "encode" && output !== "multivector" && !isChunked(verb, settings, model) && choice("side", "Encode as", [["document", "document"], ["query", "query"]])}
        {verb === "encode" && output === "dense" && widths.length > 0 && choice("dimensions", "Dimensions", [["", `${model?.dims["dense"] ?? "all"}`], ...widths.filter((width) => width !== model?.dims["dense"]).map((width): [string, string] => [`${width}`, `${width}`])])}
        {verb === "extract" && (
          <label class="grow">
            Labels, separated by commas
            <input id={`${prefix}labels`} value={labelsOf(settings, model)} placeholder="those of the model" onInput={(event) => set("labels", event.currentTarget.value)} />
          </label>
        )}
        {verb === "extract" && (
          <label>
            Threshold
            <input id={`${prefix}threshold`} type="number" min={0} max={1} step={0.05} value={settings.threshold} placeholder="model's" aria-invalid={Boolean(wrong.threshold)} onInput={(event) => set("threshold", event.currentTarget.value)} />
          </label>
        )}
        {model?.supports_lora && (
          <label>
            LoRA
            <input id={`${prefix}lora`} value={settings.lora} list={`${prefix}loras`} placeholder="none" spellcheck={false} autocomplete="off" onInput={(event) => set("lora", event.currentTarget.value)} />
            <datalist id={`${prefix}loras`}>{loras.map((name) => <option value={name} />)}</datalist>
          </label>
        )}
      </div>
      {wrong.threshold && <p class="bad" role="alert">{wrong.threshold}</p>}
      {wrong.chunks && <p class="bad" role="alert">{wrong.chunks}</p>}
    </>
  );
}

/** The parameters that have no control. */
export function AsJson({ verb, settings, set, prefix = "" }: Props) {
  const wrong = complaintsOf(verb, settings);
  const field = (name: "json" | "metadata", label: string, placeholder: string) => (
    <>
      <label>
        {label}
        <textarea id={prefix + (name === "json" ? "further" : name)} rows={2} spellcheck={false} placeholder={placeholder} value={settings[name]} aria-invalid={Boolean(wrong[name])} onInput={(event) => set(name, event.currentTarget.value)} />
      </label>
      {wrong[name] && <p class="bad" role="alert">{wrong[name]}</p>}
    </>
  );
  return (
    <details>
      <summary>More parameters, as JSON</summary>
      {field("json", "Parameters", '{"max_seq_length": 128}')}
      {verb === "extract" && !prefix && field("metadata", "Metadata of each input", '{"entities": [{"label": "person", "start": 0, "end": 3}]}')}
    </details>
  );
}
