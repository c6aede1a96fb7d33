/** The parameters of a request: controls for the common ones, JSON for the rest. */

import type { SIEError } from "sie-client";
import { jsonFault, parseMap, parseList } from "./json-fields";
import { SchemaFields, answerOf, type Faults, groupsOf, JsonField, schemaOf, hasOption } from "./playground-schema-fields";
import type { Verb } from "./playground-requests";
import type { Model } from "./types";

const OUTPUTS = ["dense", "sparse", "multivector"];
const OUTPUT_LABELS: Record<string, string> = { dense: "dense", sparse: "sparse", multivector: "a vector for each token" };

/** Return the outputs of a model. The dense vector of a MUVERA profile is in `dims` only. */
export const outputsOf = (model: Model | undefined): string[] =>
  OUTPUTS.filter((name) => model && (model.outputs.includes(name) || name in model.dims));

/** The initial settings. An empty text means the default of the model. */
export const UNSET = { output: "dense", side: "document", chunks: "", context: "true", dimensions: "", answer: "labels", threshold: "", thresholds: "", examples: "", lora: "", json: "", metadata: "" };
export type Settings = typeof UNSET & { labels?: string; schema?: string; groups?: string };

/** Return the labels of the user, else an example for a model that needs labels. */
const labelsOf = (settings: Settings, model: Model | undefined): string =>
  settings.labels ?? (model?.needs_labels && answerOf(settings, model) === "labels" ? "person, place, date" : "");

/** Return the chosen output, or the first output of a model that lacks it. */
export const outputOf = ({ output }: Settings, model: Model | undefined): string => {
  const outputs = outputsOf(model);
  return outputs.includes(output) ? output : (outputs[0] ?? "dense");
};

/** Return true if the request is for multivectors. */
export const isLateInteraction = (verb: Verb, settings: Settings, model: Model | undefined): boolean => verb === "encode" && outputOf(settings, model) === "multivector";

/** Return true if the text is one document that is encoded in chunks. */
export const isChunked = (verb: Verb, settings: Settings, model: Model | undefined): boolean =>
  verb === "encode" && outputOf(settings, model) === "dense" && Boolean(settings.chunks) && Boolean(model?.inputs.includes("text"));

const requireText = (text: string, expected: string): string => (text.trim() ? "" : `Expected ${expected}.`);

/** Return the faults of the fields on the page, empty if the request can be sent. */
export function faultsOf(verb: Verb, settings: Settings, model: Model | undefined): Faults {
  const { json, metadata, threshold, thresholds, examples, chunks } = settings;
  const answer = answerOf(settings, model);
  const [schema, groups] = [schemaOf(settings, model), groupsOf(settings)];
  const faults = {
    encode: { chunks: chunks && !/^[1-9]\d{0,4}$/.test(chunks) ? "A chunk has a whole number of tokens." : "" },
    score: {},
    extract: {
      schema: answer === "schema" ? requireText(schema, "a JSON Schema") || jsonFault(schema) : "",
      groups: answer === "groups" ? requireText(groups, "a map of groups") || jsonFault(groups) : "",
      thresholds: hasOption(model, "label_thresholds") ? jsonFault(thresholds) : "",
      examples: hasOption(model, "examples") ? jsonFault(examples, parseList) : "",
      metadata: jsonFault(metadata),
      threshold: threshold && !(Number(threshold) >= 0 && Number(threshold) <= 1) ? "A threshold is from 0 to 1." : "",
    },
  }[verb];
  return Object.fromEntries(Object.entries({ ...faults, json: jsonFault(json) }).filter(([, fault]) => fault));
}

// The field of the form for each parameter that the server may refuse.
const FIELDS = new Map<string, keyof Settings>([
  ["labels", "labels"], ["threshold", "threshold"], ["output_schema", "schema"], ["label_groups", "groups"], ["label_thresholds", "thresholds"], ["examples", "examples"],
]);

/** Return the refusals of the server for fields that have not changed since. */
export function serverFaults(refusals: (SIEError | undefined)[], sent: Settings, settings: Settings): Faults {
  const faults: Faults = {};
  for (const refusal of refusals) {
    const field = FIELDS.get(/^(?:params\.)?(\w+)/.exec(refusal?.param ?? "")?.[1] ?? "");
    if (refusal && field && sent[field] === settings[field]) faults[field] = refusal.message.replace(`${refusal.code}: `, "");
  }
  return faults;
}

const optional = (name: string, value: unknown): Record<string, unknown> => (value === undefined ? {} : { [name]: value });

/** Return the parameters of a request to a model. The parameters from JSON replace others of the same name. */
export function paramsOf(verb: Verb, settings: Settings, model: Model): Record<string, unknown> {
  const { side, dimensions, threshold, thresholds, examples, lora, json } = settings;
  const output = outputOf(settings, model);
  const labels = labelsOf(settings, model).split(",").map((label) => label.trim()).filter(Boolean);
  const takesWidth = output === "dense" && model.matryoshka_dims?.includes(Number(dimensions));
  const answer = answerOf(settings, model);
  const verbParams = {
    encode: {
      output_types: [output],
      ...(side === "query" && output !== "multivector" && !isChunked(verb, settings, model) ? { is_query: true } : {}),
      ...(takesWidth ? { dimensions: Number(dimensions) } : {}),
    },
    score: {},
    extract: {
      ...(labels.length ? { labels } : {}),
      ...(threshold ? { threshold: Number(threshold) } : {}),
      ...optional("output_schema", answer === "schema" ? parseMap(schemaOf(settings, model)) : undefined),
      ...optional("label_groups", answer === "groups" ? parseMap(groupsOf(settings)) : undefined),
      ...optional("label_thresholds", hasOption(model, "label_thresholds") ? parseMap(thresholds) : undefined),
      ...optional("examples", hasOption(model, "examples") ? parseList(examples) : undefined),
    },
  }[verb];
  return { ...verbParams, ...(lora.trim() && model.supports_lora ? { lora_id: lora.trim() } : {}), ...(parseMap(json) ?? {}) };
}

type SetSetting = (name: keyof Settings, value: string | undefined) => void;

// The answers in place of labels: the setting, the title, the parameter.
const ANSWERS: [string, string, string][] = [["schema", "values of a JSON Schema", "output_schema"], ["groups", "a label of each group", "label_groups"]];

interface Props {
  verb: Verb;
  settings: Settings;
  model: Model | undefined;
  set: SetSetting;
  /** The refusals of the server. */
  refusals?: Faults;
  /** The prefix of the ids of the fields. */
  prefix?: string;
}

/** The controls for the common parameters. */
export function Controls({ verb, model, settings, set, refusals, prefix = "" }: Props) {
  const outputs = outputsOf(model);
  const output = outputOf(settings, model);
  const faults = { ...refusals, ...faultsOf(verb, settings, model) };
  const answers = ANSWERS.filter(([, , option]) => hasOption(model, option));
  const choice = (name: keyof Settings, label: string, options: [string, string][], value = settings[name]) => (
    <label>
      {label}
      <select id={prefix + name} value={value} onChange={(event) => set(name, event.currentTarget.value)}>
        {options.map(([value, title]) => <option value={value}>{title}</option>)}
      </select>
    </label>
  );
  const loras = Object.values(model?.profiles ?? {}).flatMap((profile) => (profile.lora_id ? [profile.lora_id] : []));
  const widths = model?.matryoshka_dims ?? [];
  return (
    <>
      <div class="row controls">
        {verb === "encode" && outputs.length > 1 && choice("output", "Output", outputs.map((name) => [name, OUTPUT_LABELS[name] ?? name]), output)}
        {verb === "encode" && output === "dense" && !prefix && model?.inputs.includes("text") && (
          <label>
            Most tokens of a chunk
            <input id="chunks" type="number" min={1} value={settings.chunks} placeholder="none" aria-invalid={Boolean(faults.chunks)} onInput={(event) => set("chunks", event.currentTarget.value)} />
          </label>
        )}
        {isChunked(verb, settings, model) && choice("context", "Context", [["true", "whole document"], ["false", "each chunk alone"]])}
        {verb === "encode" && output !== "multivector" && !isChunked(verb, settings, model) && choice("side", "Encode as", [["document", "document"], ["query", "query"]])}
        {verb === "encode" && output === "dense" && widths.length > 0 && choice("dimensions", "Dimensions", [["", `${model?.dims["dense"] ?? "all"}`], ...widths.filter((width) => width !== model?.dims["dense"]).map((width): [string, string] => [`${width}`, `${width}`])])}
        {verb === "extract" && answers.length > 0 && choice("answer", "Answer", [["labels", "entities or classes of the labels"], ...answers.map(([name, title]): [string, string] => [name, title])], answerOf(settings, model))}
        {verb === "extract" && (
          <label class="grow">
            Labels, separated by commas
            <input id={`${prefix}labels`} value={labelsOf(settings, model)} placeholder={answerOf(settings, model) === "labels" ? "those of the model" : "none"} aria-invalid={Boolean(faults.labels)} onInput={(event) => set("labels", event.currentTarget.value)} />
          </label>
        )}
        {verb === "extract" && (
          <label>
            Threshold
            <input id={`${prefix}threshold`} type="number" min={0} max={1} step={0.05} value={settings.threshold} placeholder="model's" aria-invalid={Boolean(faults.threshold)} onInput={(event) => set("threshold", event.currentTarget.value)} />
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
      {[faults.labels, faults.threshold, faults.chunks].map((fault) => fault && <p class="bad" role="alert">{fault}</p>)}
      {verb === "extract" && <SchemaFields model={model} settings={settings} faults={faults} prefix={prefix} set={set} />}
    </>
  );
}

/** The fields for the other parameters, as JSON. */
export function JsonParameters({ verb, model, settings, set, refusals, prefix = "" }: Props) {
  const faults = { ...refusals, ...faultsOf(verb, settings, model) };
  const field = (name: "json" | "metadata" | "thresholds" | "examples", label: string, placeholder: string) => (
    <JsonField id={prefix + (name === "json" ? "further" : name)} label={label} placeholder={placeholder} value={settings[name]} fault={faults[name]} onValue={(value) => set(name, value)} />
  );
  return (
    <details open={Boolean(faults.thresholds ?? faults.examples) || undefined}>
      <summary>More parameters, as JSON</summary>
      {verb === "extract" && hasOption(model, "label_thresholds") && field("thresholds", "Least score of each label, or of a value by its path", '{"person": 0.3, "lines.price": 0.7}')}
      {verb === "extract" && hasOption(model, "examples") && field("examples", "Examples: texts with their labels, read before each text", '[{"text": "Now!", "labels": ["urgent"]}]')}
      {field("json", "Parameters", '{"max_seq_length": 128}')}
      {verb === "extract" && !prefix && field("metadata", "Metadata of each input", '{"entities": [{"label": "person", "start": 0, "end": 3}]}')}
    </details>
  );
}
