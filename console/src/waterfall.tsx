/** Where the time of a request went, as bars one after the other. */

/** A part of a request, as its worker reports it. */
export interface Part {
  stages?: Record<string, number> | undefined;
}

const ROW = 24; // pixels

/** The stages of a request in order, each with its milliseconds. The queue of the timing includes the load of the model and
 * the wait for the device, which the slowest part tells. */
export function stagesOf(timing: Record<string, number>, parts: Part[] = []): [string, number][] {
  const slowest = parts.reduce<Record<string, number>>((kept, { stages = {} }) => ((stages["worker_ms"] ?? 0) > (kept["worker_ms"] ?? 0) ? stages : kept), {});
  const queue = timing["queue_time"] ?? 0;
  const load = Math.min(queue, slowest["load_ms"] ?? 0);
  const device = Math.min(queue - load, slowest["device_wait_ms"] ?? 0);
  return [
    ["queue", queue - load - device],
    ["model load", load],
    ["tokenise", timing["preprocess_time"] ?? 0],
    ["batch wait", timing["batch_wait_time"] ?? 0],
    ["device wait", device],
    ["inference", timing["inference_time"] ?? 0],
    ["postprocess", timing["postprocess_time"] ?? 0],
    ["other", timing["unattributed_time"] ?? 0],
  ];
}

export function Waterfall({ timing, parts }: { timing: Record<string, number>; parts?: Part[] | undefined }) {
  const total = timing["total_time"] ?? 0;
  const stages = stagesOf(timing, parts);
  let begun = 0;
  return (
    <svg class="waterfall" viewBox={`0 0 600 ${ROW * stages.length + 6}`} role="img" aria-label={`total ${total.toFixed(1)} ms`}>
      {stages.map(([label, took], row) => {
        const x = 140 + (345 * begun) / (total || 1);
        begun += took;
        return (
          <g class={`stage-${row}`}>
            <text x="130" y={row * ROW + 18} text-anchor="end">{label}</text>
            <rect x={x} y={row * ROW + 5} width={Math.max(1, (345 * took) / (total || 1))} height="16" rx="2" />
            <text x="596" y={row * ROW + 18} text-anchor="end">{`${took.toFixed(took < 100 ? 2 : 1)} ms`}</text>
          </g>
        );
      })}
    </svg>
  );
}
