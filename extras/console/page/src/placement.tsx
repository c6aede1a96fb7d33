import { useState } from "preact/hooks";
import { usePolling } from "./polling";
import { Table } from "./table";
import type { PlacedModel, Placement as PlacementView } from "./types";
import { formatBytes } from "./format";

const EVERY_MS = 3000;

/** Return why a model is on its workers, from the waiting work, the incoming work and the time of the last new host. */
function placementReason(row: PlacedModel, workers: number): string {
  const hosts = Object.keys(row.hosts).length;
  const states = new Set(Object.values(row.hosts));
  if (states.has("failed")) return "the load failed there: the page of the model has the reason";
  if (states.has("loading")) return "the worker loads it now, for the requests that wait";
  if (!states.has("loaded")) return "the worker is chosen, and loads it for the first request";
  if (hosts > 1) {
    const since = row.raised_s === null ? "" : `, the last worker was added ${Math.round(row.raised_s)} s ago`;
    const all = hosts === workers ? " (all of them)" : "";
    return `${hosts} workers${all}: more requests came than one worker answers in time${since}`;
  }
  if (row.waiting || row.tokens_per_s) return "the worker has it loaded and keeps up with the requests";
  return "the worker has it loaded, and no other model needs the memory";
}

/** The placement table of each lane. */
export function Placement() {
  const [filter, setFilter] = useState("");
  const { value, error } = usePolling<PlacementView>(`/v1/placement?filter=${encodeURIComponent(filter.trim())}`, EVERY_MS);
  const fault = error && <p class="bad" role="alert">{error}</p>;
  if (!value) return fault || null;
  if (!value.lanes.some((lane) => lane.models) && !filter) return fault || <p class="dim">No model is placed yet: the first request for a model places it.</p>;
  return (
    <>
      {fault}
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
