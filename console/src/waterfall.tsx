/** Where the time of a request went, as bars one after the other. */

import { stagesOf } from "./stages";

const ROW = 24; // pixels

export function Waterfall({ timing }: { timing: Record<string, number> }) {
  const total = timing["total_time"] ?? 0;
  const stages = stagesOf(timing);
  let begun = 0;
  return (
    <svg class="waterfall" viewBox={`0 0 600 ${ROW * stages.length + 6}`} role="img" aria-label={`total ${total.toFixed(1)} ms`}>
      {stages.map(([label, took, colour], row) => {
        const x = 140 + (345 * begun) / (total || 1);
        begun += took;
        return (
          <g>
            <text x="130" y={row * ROW + 18} text-anchor="end">{label}</text>
            <rect x={x} y={row * ROW + 5} width={Math.max(1, (345 * took) / (total || 1))} height="16" rx="2" fill={colour} />
            <text x="596" y={row * ROW + 18} text-anchor="end">{`${took.toFixed(took < 100 ? 2 : 1)} ms`}</text>
          </g>
        );
      })}
    </svg>
  );
}
