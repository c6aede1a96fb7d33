import { stagesOf } from "./stages";

const ROW_HEIGHT = 24;

/** The stages of a request as bars, one after the other in time. */
export function Waterfall({ timing }: { timing: Record<string, number> }) {
  const total = timing["total_time"] ?? 0;
  const stages = stagesOf(timing);
  let startMs = 0;
  return (
    <svg class="waterfall" viewBox={`0 0 600 ${ROW_HEIGHT * stages.length + 6}`} role="img" aria-label={`total ${total.toFixed(1)} ms`}>
      {stages.map(([label, ms, colour], row) => {
        const x = 140 + (345 * startMs) / (total || 1);
        startMs += ms;
        return (
          <g>
            <text x="130" y={row * ROW_HEIGHT + 18} text-anchor="end">{label}</text>
            <rect x={x} y={row * ROW_HEIGHT + 5} width={Math.max(1, (345 * ms) / (total || 1))} height="16" rx="2" fill={colour} />
            <text x="596" y={row * ROW_HEIGHT + 18} text-anchor="end">{`${ms.toFixed(ms < 100 ? 2 : 1)} ms`}</text>
          </g>
        );
      })}
    </svg>
  );
}
