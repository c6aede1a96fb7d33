import type { CallOptions } from "sie-client";
import { createClient } from "./api";
import { usePolling } from "./polling";
import { Table } from "./table";

const EVERY_MS = 5000;

const listPools = async (options: CallOptions) => createClient().pools.list(options);

/** The pools and the reservations of workers, with the time until each lease ends. */
export function Reservations() {
  const { value: pools, error } = usePolling(listPools, EVERY_MS);
  return (
    <>
      {error && <p class="bad" role="alert">{error}</p>}
      {pools?.length === 0 && <p class="dim">No pool has announced itself.</p>}
      {pools && pools.length > 0 && (
        <Table label="Pools and reservations" class="cards" rows={{ id: "pools" }} columns={["pool", "state", "reserves", "pinned models", { number: "workers" }, { number: "lease ends in, s" }]}>
          {pools.map(({ name, spec, status }) => (
            <tr key={name}>
              <td class="name">{name}</td>
              <td data-label="state">{status.state}</td>
              <td data-label="reserves">{Object.entries(spec.gpus).map(([profile, count]) => `${count} ${profile}`).join(", ")}</td>
              <td data-label="pinned models" class="name">{(spec.pinned_models ?? []).join(", ")}</td>
              <td data-label="workers" class="number">{status.assigned_workers.length}</td>
              <td data-label="lease ends in, s" class="number">{status.expires_at ? Math.max(0, Math.round(status.expires_at - Date.now() / 1000)) : ""}</td>
            </tr>
          ))}
        </Table>
      )}
    </>
  );
}
