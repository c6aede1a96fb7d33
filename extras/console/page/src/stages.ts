/** The stages of a request, with the names of `sie_contracts.stages` and their colours. All views use these. */

const STAGES: Record<string, [string, string]> = {
  queue_time: ["queue", "#d08b00"],
  load_time: ["model load", "#e0584f"],
  preprocess_time: ["prepare", "#19a3a3"],
  batch_wait_time: ["batch wait", "#9a6bff"],
  inference_time: ["inference", "#4c8dff"],
  postprocess_time: ["postprocess", "#2a9d4a"],
  unattributed_time: ["rest", "#888888"],
};

/** Return the name and the colour of a stage. */
export const stageOf = (name: string): [string, string] => STAGES[name] ?? [name, "#888888"];

/** Return the stages of a request in their order, each with its milliseconds and its colour. */
export const stagesOf = (timing: Record<string, number>): [string, number, string][] =>
  Object.entries(STAGES).map(([name, [label, colour]]) => [label, timing[name] ?? 0, colour]);
