/** The stages of a request, by the same words everywhere. */

/** A part of a request, as its worker reports it. */
export interface Part {
  stages?: Record<string, number> | undefined;
}

const WORDS: Record<string, string> = {
  queue_time: "queue",
  preprocess_time: "prepare",
  batch_wait_time: "batch wait",
  inference_time: "inference",
  postprocess_time: "postprocess",
  unattributed_time: "rest",
  total_time: "total",
};

/** The word for a time of a reply. */
export const stageWord = (name: string): string => WORDS[name] ?? name;

/** The stages of a request in order, each with its milliseconds. The queue of the timing includes the load of the model and
 * the wait for the device, which the slowest part tells. */
export function stagesOf(timing: Record<string, number>, parts: Part[] = []): [string, number][] {
  const slowest = parts.reduce<Record<string, number>>((kept, { stages = {} }) => ((stages["worker_ms"] ?? 0) > (kept["worker_ms"] ?? 0) ? stages : kept), {});
  const queue = timing["queue_time"] ?? 0;
  const load = Math.min(queue, slowest["load_ms"] ?? 0);
  const device = Math.min(queue - load, slowest["device_wait_ms"] ?? 0);
  const named = (name: string): [string, number] => [stageWord(name), timing[name] ?? 0];
  return [
    [stageWord("queue_time"), queue - load - device],
    ["model load", load],
    named("preprocess_time"),
    named("batch_wait_time"),
    ["device wait", device],
    named("inference_time"),
    named("postprocess_time"),
    named("unattributed_time"),
  ];
}
