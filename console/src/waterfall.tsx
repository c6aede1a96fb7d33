/** Where the time of a request went, as bars one after the other. */

const STAGES: [string, string][] = [
  ["queue_time", "queue"],
  ["preprocess_time", "tokenise"],
  ["batch_wait_time", "batch wait"],
  ["inference_time", "inference"],
  ["postprocess_time", "postprocess"],
  ["unattributed_time", "other"],
];

export function Waterfall({ timing }: { timing: Record<string, number> }) {
  const total = timing["total_time"] ?? 0;
  let begun = 0;
  return (
    <svg class="waterfall" viewBox="0 0 600 150" role="img" aria-label={`total ${total.toFixed(1)} ms`}>
      {STAGES.map(([name, label], row) => {
        const took = timing[name] ?? 0;
        const x = 110 + (380 * begun) / (total || 1);
        begun += took;
        return (
          <g class={`stage-${row}`}>
            <text x="100" y={row * 24 + 18} text-anchor="end">{label}</text>
            <rect x={x} y={row * 24 + 5} width={Math.max(1, (380 * took) / (total || 1))} height="16" rx="2" />
            <text x="596" y={row * 24 + 18} text-anchor="end">{`${took.toFixed(2)} ms`}</text>
          </g>
        );
      })}
    </svg>
  );
}
