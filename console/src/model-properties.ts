/** What the views say of a model in a word or two. */

import type { Model } from "./types";
import { approximateBytes } from "./format";

/** The path of a model in the API. */
export const modelPath = (id: string): string => `/v1/models/${id.split("/").map(encodeURIComponent).join("/")}`;

export const baseId = (model: Model): string => model.variant_of ?? model.id;

/** What is in use or in trouble comes first, then what is on the disk, such as folders of one's own. */
const RANKS: Record<Model["state"], number> = { loaded: 0, loading: 1, unloading: 1, failed: 2, available: 3 };
export const sortRank = (model: Model): number => RANKS[model.state] + (model.state === "available" && !model.on_disk ? 1 : 0);

/** The state, of a download how far it is, and of what is not loaded where its weights are. */
export function stateText(model: Model): string {
  const { state, downloads } = model;
  const [done, total] = downloads.reduce(([done, total], download) => [done + download.done_bytes, total + download.total_bytes], [0, 0]);
  if (total) return `${state} ${Math.floor((100 * done) / total)} %`;
  if (state !== "available") return state;
  if (model.on_disk) return "on disk";
  return model.download_bytes ? `to download, ${approximateBytes(model.download_bytes)}` : "to download";
}

/** The size that its description names. */
export const parameterCount = ({ description }: Model): string => /[\d.]+[MB](?= parameters)/.exec(description)?.[0] ?? "";

const KINDS: [string, (model: Model) => boolean][] = [
  ["Dense vectors", ({ outputs }) => outputs.includes("dense")],
  ["Sparse vectors", ({ outputs }) => outputs.includes("sparse")],
  ["Late interaction", ({ outputs }) => outputs.includes("multivector")],
  ["Takes images", ({ inputs }) => inputs.includes("image")],
  ["Takes sounds", ({ inputs }) => inputs.includes("audio")],
  ["Takes documents", ({ inputs }) => inputs.includes("document")],
];

/** The kinds that tell these models apart. */
export const kindsOf = (models: Model[]): string[] =>
  KINDS.filter(([, fits]) => models.some(fits) && !models.every(fits)).map(([name]) => name);

export const isOfKind = (model: Model, kind: string): boolean => KINDS.find(([name]) => name === kind)?.[1](model) ?? true;

/** Whether each word is somewhere in what is known of a model. */
export function matchesSearch(model: Model, text: string): boolean {
  const content = [model.id, model.description, model.license, stateText(model), ...model.tasks, ...model.inputs, ...model.outputs].join("\n").toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => content.includes(word));
}
