import { useState } from "preact/hooks";
import { useAsked } from "./asked";
import { Charts } from "./charts";
import { DeadLetters } from "./dead-letters";
import { Doctor } from "./doctor";
import { Placement } from "./placement";
import { Requests } from "./requests";
import { Reservations } from "./reservations";
import type { Cluster as State } from "./types";
import { bytes } from "./units";

const EVERY_MS = 1000;
const PARTS = ["Queue", "Workers", "Placement", "Slow and failed requests", "Dead letters", "Doctor", "Models"];

/** Bring the part with this heading to the top. */
function show(name: string) {
  [...document.querySelectorAll("h2")].find((each) => each.textContent?.startsWith(name))?.scrollIntoView();
}

export function Cluster() {
  const [filter, setFilter] = useState("");
  const { value: state, trouble } = useAsked<State>(`/v1/cluster?filter=${encodeURIComponent(filter.trim())}`, EVERY_MS);
  const healthy = (state?.cluster.worker_count ?? 0) > 0;
  const words = trouble || (!state ? "connecting" : healthy ? "healthy" : "degraded: no healthy worker");
  return (
    <section>
      <p><span id="connection" role="status" class={`state ${!trouble && healthy ? "healthy" : "lost"}`}>{words}</span></p>
      <nav class="jumps" aria-label="Parts of this view">
        {PARTS.map((name) => <button type="button" class="link" onClick={() => show(name)}>{name}</button>)}
      </nav>
      {state && <Figures state={state} />}
      <Charts />
      {state && <Lanes state={state} />}
      {state && <Workers state={state} />}
      <Placement />
      <Reservations />
      <Requests />
      <DeadLetters />
      <Doctor />
      <h2>Models</h2>
      <label class="row">
        Filter
        <input id="filter" type="search" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
      </label>
      {state && <Models state={state} />}
    </section>
  );
}

function Figures({ state }: { state: State }) {
  const waiting = state.queues?.reduce((sum, lane) => sum + lane.messages, 0);
  const rows: [string, string][] = [
    ["version", state.version],
    ["workers", `${state.cluster.worker_count}`],
    ["models loaded", `${state.cluster.models_loaded}`],
    ["requests/s", state.cluster.total_qps.toFixed(1)],
    ["in flight", `${state.counts.in_flight}`],
    ["queued", waiting === undefined ? "not known" : `${waiting}`],
    ["dead letters", `${state.counts.dead_letters}`],
  ];
  return <dl class="figures" id="figures">{rows.map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}</dl>;
}

function Lanes({ state }: { state: State }) {
  const rows = (state.queues ?? []).filter((lane) => lane.messages);
  if (!rows.length) return <><h2>Queue</h2><p class="dim">{state.queues ? "Nothing waits." : "What waits is not known: the broker did not answer."}</p></>;
  return (
    <>
      <h2>Queue</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Queue">
        <table>
          <thead><tr><th>lane</th><th>priority</th><th class="number">messages</th><th class="number">oldest, s</th></tr></thead>
          <tbody>
            {rows.map((lane) => (
              <tr>
                <td>{`${lane.pool}.${lane.machine_profile}.${lane.bundle}`}</td>
                <td>{lane.priority}</td>
                <td class="number">{lane.messages}</td>
                <td class="number">{lane.oldest_s.toFixed(1)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

function Workers({ state }: { state: State }) {
  const rest = state.counts.workers - state.workers.length;
  return (
    <>
      <h2>Workers</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Workers">
        <table>
          <thead>
            <tr><th>worker</th><th>state</th><th>pool</th><th>machine profile</th><th>bundle</th><th>device</th><th>memory</th><th class="number">in flight</th><th>loaded models</th></tr>
          </thead>
          <tbody id="workers">
            {state.workers.map((worker) => {
              const health = worker.healthy ? "healthy" : "unhealthy";
              return (
                <tr key={worker.name}>
                  <td class="name">{worker.name}</td>
                  <td><span class={`state ${health}`}>{health}</span></td>
                  <td>{worker.pool}</td>
                  <td>{worker.gpu}</td>
                  <td>{worker.bundle}</td>
                  <td>{worker.device}</td>
                  <td>
                    {worker.memory_total_bytes > 0 && (
                      <>
                        <meter max={worker.memory_total_bytes} value={worker.memory_used_bytes} aria-label={`Memory of ${worker.name}`} />
                        {` ${bytes(worker.memory_used_bytes)} of ${bytes(worker.memory_total_bytes)}`}
                      </>
                    )}
                  </td>
                  <td class="number">{worker.queue_depth}</td>
                  <td class="wide">{worker.loaded_models.join(", ")}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {!state.workers.length && <p class="dim">No worker has announced itself. Requests wait until one does.</p>}
      {rest > 0 && <p class="dim">{`${rest} more workers`}</p>}
    </>
  );
}

function Models({ state }: { state: State }) {
  const rest = state.counts.models - state.models.length;
  return (
    <>
      <div class="scroll" tabIndex={0} role="region" aria-label="Models">
        <table>
          <thead><tr><th>model</th><th>state</th><th class="number">workers</th><th>machine profiles</th><th class="number">queue</th></tr></thead>
          <tbody id="models">
            {state.models.map((model) => (
              <tr key={model.name}>
                <td class="name">{model.name}</td>
                <td class="wrap">
                  <span class={`state ${model.state}`}>{model.state}</span>
                  {model.state === "failed" && <p class="dim failure">{state.failures[model.name] ?? ""}</p>}
                </td>
                <td class="number">{model.worker_count}</td>
                <td>{model.gpu_types.join(", ")}</td>
                <td class="number">{model.total_queue_depth}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {!state.models.length && <p class="dim">No model has this in its name.</p>}
      {rest > 0 && <p class="dim">{`${rest} more models`}</p>}
    </>
  );
}
