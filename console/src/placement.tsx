import { useState } from "preact/hooks";
import { usePolling } from "./polling";
import { Table } from "./table";
import type { PlacedModel, Placement as DoctorReport } from "./types";
import { formatBytes } from "./format";

const EVERY_MS = 3000;

/** Why a model is where it is, of what decides it: the work that waits, what comes in, and when a host was added. */
export function placementReason(row: PlacedModel, workers: number): string {
  const hosts = Object.keys(row.hosts).length;
  const states = new Set(Object.values(row.hosts));
  if (states.has("failed")) return "its load failed there: the model's own page says why";
  if (states.has("loading")) return "it is being loaded for the work that waits";
  if (!states.has("loaded")) return "chosen for it; loaded as soon as there is work";
  if (hosts > 1) {
    const since = row.raised_s === null ? "" : `, the last one ${Math.round(row.raised_s)} s ago`;
    const most = hosts === workers ? " (all that there are)" : "";
    return `${hosts} hosts${most}: more work came than one serves in time${since}`;
  }
  if (row.waiting || row.tokens_per_s) return "it has it loaded, and keeps up with what comes in";
  return "it has it loaded, and nobody needs the memory";
}

/** The placement table of each lane. */
export function Placement() {
  const [filter, setFilter] = useState("");
  const { value, trouble } = usePolling<DoctorReport>(`/v1/placement?filter=${encodeURIComponent(filter.trim())}`, EVERY_MS);
  if (!value) return trouble ? <p class="bad">{trouble}</p> : null;
  if (!value.lanes.some((lane) => lane.models) && !filter) return <p class="dim">No model is placed yet: the first request for one places it.</p>;
  return (
    <>
      <label class="row">
        Model
        <input id="placement-filter" type="search" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
      </label>
      {value.lanes.map((lane) => (
        <div key={lane.lane}>
          <h3>{`${lane.lane}: healthy workers ${lane.workers}, models placed ${lane.models}`}</h3>
          <Table label={`Placement of ${lane.lane}`} class="cards" rows={{ class: "placed" }} columns={["model", "workers", { number: "device memory" }, { number: "tokens/s" }, { number: "waiting" }, { number: "oldest, s" }, "why there"]}>
            {lane.shown.map((row) => (
              <tr key={row.model}>
                <td class="name">{row.model}</td>
                <td data-label="workers">{Object.entries(row.hosts).map(([worker, state]) => <span class={`state ${state}`}>{`${worker} ${state === "-" ? "not loaded" : state} `}</span>)}</td>
                <td data-label="device memory" class="number">{row.memory_bytes ? formatBytes(row.memory_bytes) : ""}</td>
                <td data-label="tokens/s" class="number">{row.tokens_per_s.toFixed(0)}</td>
                <td data-label="waiting" class="number">{row.waiting}</td>
                <td data-label="oldest, s" class="number">{row.oldest_s ? row.oldest_s.toFixed(1) : ""}</td>
                <td data-label="why there" class="wide">{placementReason(row, lane.workers)}</td>
              </tr>
            ))}
          </Table>
          {lane.models > lane.shown.length && <p class="dim">{`${lane.models - lane.shown.length} more`}</p>}
        </div>
      ))}
    </>
  );
}
