/** The stages of a request, by the same words everywhere: those of `sie_contracts.stages`. */

const WORDS: Record<string, string> = {
  queue_time: "queue",
  load_time: "model load",
  preprocess_time: "prepare",
  batch_wait_time: "batch wait",
  device_wait_time: "device wait",
  inference_time: "inference",
  postprocess_time: "postprocess",
  unattributed_time: "rest",
};

/** The word for a time of a reply. */
export const stageWord = (name: string): string => WORDS[name] ?? name;

/** The stages of a request in order, each with its milliseconds. */
export const stagesOf = (timing: Record<string, number>): [string, number][] =>
  Object.entries(WORDS).map(([name, word]) => [word, timing[name] ?? 0]);
