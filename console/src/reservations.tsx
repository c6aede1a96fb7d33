import type { CallOptions } from "sie-client";
import { client } from "./api";
import { useAsked } from "./asked";

const EVERY_MS = 5000;

const listed = async (options: CallOptions) => client().pools.list(options);

/** Pools and the reservations of workers, with what is left of each lease. */
export function Reservations() {
  const { value: pools } = useAsked(listed, EVERY_MS);
  if (!pools) return null;
  if (!pools.length) return <p class="dim">No pool has announced itself.</p>;
  return (
    <>
      <div class="scroll" tabIndex={0} role="region" aria-label="Pools and reservations">
        <table class="cards">
          <thead><tr><th>pool</th><th>state</th><th>reserves</th><th>pinned models</th><th class="number">workers</th><th class="number">lease ends in, s</th></tr></thead>
          <tbody id="pools">
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
          </tbody>
        </table>
      </div>
    </>
  );
}
