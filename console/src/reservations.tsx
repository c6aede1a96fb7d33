import { useAsked } from "./asked";

const EVERY_MS = 5000;

interface Pool {
  name: string;
  spec: { gpus: Record<string, number>; bundle: string | null; minimum_worker_count: number; pinned_models: string[] };
  status: { state: string; assigned_workers: { name: string; gpu: string }[]; expires_at: number | null };
}

/** Pools and the reservations of workers, with what is left of each lease. */
export function Reservations() {
  const { value } = useAsked<{ pools: Pool[] }>("/v1/pools", EVERY_MS);
  if (!value?.pools.length) return null;
  return (
    <>
      <h2>Pools and reservations</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Pools and reservations">
        <table>
          <thead><tr><th>pool</th><th>state</th><th>reserves</th><th>pinned models</th><th class="number">workers</th><th class="number">lease ends in, s</th></tr></thead>
          <tbody id="pools">
            {value.pools.map(({ name, spec, status }) => (
              <tr key={name}>
                <td>{name}</td>
                <td>{status.state}</td>
                <td>{Object.entries(spec.gpus).map(([profile, count]) => `${count} ${profile}`).join(", ")}</td>
                <td>{spec.pinned_models.join(", ")}</td>
                <td class="number">{status.assigned_workers.length}</td>
                <td class="number">{status.expires_at ? Math.max(0, Math.round(status.expires_at - Date.now() / 1000)) : ""}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
