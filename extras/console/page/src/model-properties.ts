/** Properties of a model as text, its kinds and its place in lists. */

import type { Model } from "./types";
import { approximateBytes } from "./format";

/** Return the path of a model in the API. */
export const modelPath = (id: string): string => `/v1/models/${id.split("/").map(encodeURIComponent).join("/")}`;

/** Return the id of the model of a profile, or the id of the model itself. */
export const baseId = (model: Model): string => model.variant_of ?? model.id;

const RANKS: Record<Model["state"], number> = { loaded: 0, loading: 1, unloading: 1, failed: 2, available: 3 };
/** Return the place of a model in lists: loaded, loading, failed, on disk, to download. */
export const sortRank = (model: Model): number => RANKS[model.state] + (model.state === "available" && !model.on_disk ? 1 : 0);

/** Return the state of a model: the progress of its download too, and for a model that is not loaded where its weights are. */
export function stateText(model: Model): string {
  const { state, downloads } = model;
  const [done, total] = downloads.reduce(([done, total], download) => [done + download.done_bytes, total + download.total_bytes], [0, 0]);
  if (total) return `${state} ${Math.floor((100 * done) / total)} %`;
  if (state !== "available") return state;
  if (model.on_disk) return "on disk";
  return model.download_bytes ? `to download, ${approximateBytes(model.download_bytes)}` : "to download";
}

/** Return the number of parameters in the description of a model, such as 22M. */
export const parameterCount = ({ description }: Model): string => /[\d.]+[MB](?= parameters)/.exec(description)?.[0] ?? "";

const KINDS: [string, (model: Model) => boolean][] = [
  ["Dense vectors", ({ outputs }) => outputs.includes("dense")],
  ["Sparse vectors", ({ outputs }) => outputs.includes("sparse")],
  ["Late interaction", ({ outputs }) => outputs.includes("multivector")],
  ["Takes images", ({ inputs }) => inputs.includes("image")],
  ["Takes sounds", ({ inputs }) => inputs.includes("audio")],
  ["Takes documents", ({ inputs }) => inputs.includes("document")],
];

/** Return the kinds that some of these models have and others lack. */
export const kindsOf = (models: Model[]): string[] =>
  KINDS.filter(([, fits]) => models.some(fits) && !models.every(fits)).map(([name]) => name);

/** Return true if a model is of a kind. The empty kind is that of all models. */
export const isOfKind = (model: Model, kind: string): boolean => KINDS.find(([name]) => name === kind)?.[1](model) ?? true;

/** Return true if each word of a search is in the properties of a model. */
export function matchesSearch(model: Model, text: string): boolean {
  const content = [model.id, model.description, model.license, stateText(model), ...model.tasks, ...model.inputs, ...model.outputs].join("\n").toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => content.includes(word));
}

/** Return the outputs of a model, each with its dimensions. */
export const outputsText = ({ outputs, dims }: Model): string => outputs.map((name) => (dims[name] ? `${name} ${dims[name]}` : name)).join(", ");
