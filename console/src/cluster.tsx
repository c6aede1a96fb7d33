import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { get, Refusal } from "./api";
import type { Cluster as State, History, Slow } from "./types";
import { Waterfall } from "./waterfall";

const EVERY_MS = 1000;
const LATE_MS = 3000; // of an answer, after which the page says that there is none
const HISTORY_EVERY_MS = 10_000;

/** What a path answers, asked again `everyMs` after each answer, and never while the page is hidden. */
function useAsked<T>(path: string, everyMs: number): { value?: T; trouble: string } {
  const [value, setValue] = useState<T>();
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    let timer = 0;
    let ended = false;
    async function turn() {
      if (document.visibilityState === "visible") {
        try {
          const next = await get<T>(path, LATE_MS);
          if (ended) return;
          setValue(next);
          setTrouble("");
        } catch (error) {
          if (!(error instanceof Refusal)) throw error;
          if (ended) return;
          setTrouble(error.status ? error.message : "no connection, trying again");
        }
      }
      if (!ended) timer = window.setTimeout(turn, everyMs);
    }
    void turn();
    return () => {
      ended = true;
      window.clearTimeout(timer);
    };
  }, [path, everyMs]);
  return { value, trouble };
}

export function Cluster() {
  const [filter, setFilter] = useState("");
  const { value: state, trouble } = useAsked<State>(`/v1/cluster?filter=${encodeURIComponent(filter.trim())}`, EVERY_MS);
  const healthy = (state?.cluster.worker_count ?? 0) > 0;
  const words = trouble || (!state ? "connecting" : healthy ? "healthy" : "degraded: no healthy worker");
  return (
    <section>
      <p><span id="connection" role="status" class={`state ${!trouble && healthy ? "healthy" : "lost"}`}>{words}</span></p>
      {state && <Figures state={state} />}
      <Charts />
      {state && <Lanes state={state} />}
      {state && <Workers state={state} />}
      <Requests />
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
  if (!rows.length) return null;
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

const gib = (bytes: number): string => (bytes / 2 ** 30).toFixed(1);

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
                  <td>{worker.name}</td>
                  <td><span class={`state ${health}`}>{health}</span></td>
                  <td>{worker.pool}</td>
                  <td>{worker.gpu}</td>
                  <td>{worker.bundle}</td>
                  <td>{worker.device}</td>
                  <td>
                    {worker.memory_total_bytes > 0 && (
                      <>
                        <meter max={worker.memory_total_bytes} value={worker.memory_used_bytes} aria-label={`Memory of ${worker.name}`} />
                        {` ${gib(worker.memory_used_bytes)} of ${gib(worker.memory_total_bytes)} GiB`}
                      </>
                    )}
                  </td>
                  <td class="number">{worker.queue_depth}</td>
                  <td>{worker.loaded_models.join(", ")}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
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
                <td>{model.name}</td>
                <td>
                  <span class={`state ${model.state}`}>{model.state}</span>
                  {model.state === "failed" && <span class="dim">{` ${state.failures[model.name] ?? ""}`}</span>}
                </td>
                <td class="number">{model.worker_count}</td>
                <td>{model.gpu_types.join(", ")}</td>
                <td class="number">{model.total_queue_depth}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {rest > 0 && <p class="dim">{`${rest} more models`}</p>}
    </>
  );
}

const COLOURS = ["#4c8dff", "#e0584f", "#2a9d4a", "#d08b00", "#9a6bff", "#19a3a3", "#888888"];

function Charts() {
  const { value: history } = useAsked<History>("/v1/history", HISTORY_EVERY_MS);
  if (!history?.steps.length) return null;
  // nothing was answered in the steps that are left out
  const known = new Map(history.steps.map((step) => [step.at, step]));
  const first = history.steps[0]?.at ?? 0;
  const last = Math.floor(history.now / history.step_s) * history.step_s;
  const steps = Array.from({ length: 1 + Math.max(0, (last - first) / history.step_s) }, (_, number) => {
    const at = first + number * history.step_s;
    return known.get(at) ?? { at, requests: 0, errors: {}, p50_ms: undefined, p99_ms: undefined };
  });
  const times = steps.map((step) => step.at);
  const rates = steps.map((step) => step.requests / history.step_s);
  const errors = steps.map((step) => Object.values(step.errors).reduce((sum, count) => sum + count, 0) / history.step_s);
  const total = history.stages.indexOf("total_time");
  const at = (name: "p50_ms" | "p99_ms", stage: number) => steps.map((step) => step[name]?.[stage] ?? null);
  return (
    <>
      <h2>Last hour, at this gateway</h2>
      <div class="charts">
        <Chart title="Requests a second" series={[["requests", rates], ["errors", errors]]} times={times} />
        <Chart title="Latency, ms" series={[["median", at("p50_ms", total)], ["99th percentile", at("p99_ms", total)]]} times={times} />
        <Chart
          title="Stages, 99th percentile, ms"
          series={history.stages.filter((_, place) => place !== total).map((name, place) => [name.replace("_time", "").replace("_", " "), at("p99_ms", place)])}
          times={times}
        />
      </div>
    </>
  );
}

function Chart({ title, series, times }: { title: string; series: [string, (number | null)[]][]; times: number[] }) {
  const place = useRef<HTMLDivElement>(null);
  const drawn = useRef<uPlot | null>(null);
  const data = [times, ...series.map(([, values]) => values)] as uPlot.AlignedData;
  useEffect(() => {
    if (!place.current) return;
    const colour = getComputedStyle(place.current).color;
    const plot = new uPlot(
      {
        width: place.current.clientWidth || 300,
        height: 180,
        legend: { live: false },
        axes: [{ stroke: colour, grid: { width: 0.2, stroke: colour } }, { stroke: colour, grid: { width: 0.2, stroke: colour } }],
        series: [{}, ...series.map(([label], number) => ({ label, stroke: COLOURS[number % COLOURS.length], width: 1.5, spanGaps: false, points: { show: true, size: 4 } }))],
      },
      data,
      place.current,
    );
    drawn.current = plot;
    const sized = new ResizeObserver(([entry]) => entry && plot.setSize({ width: entry.contentRect.width, height: 180 }));
    sized.observe(place.current);
    return () => {
      sized.disconnect();
      plot.destroy();
    };
  }, [title]);
  useEffect(() => drawn.current?.setData(data), [times, series]);
  return (
    <figure class="panel">
      <figcaption>{title}</figcaption>
      <div ref={place} />
    </figure>
  );
}

function Requests() {
  const { value } = useAsked<{ requests: Slow[] }>("/v1/requests?limit=20", HISTORY_EVERY_MS);
  const [open, setOpen] = useState("");
  if (!value?.requests.length) return null;
  return (
    <>
      <h2>Slow and failed requests of the last hour</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Slow requests">
        <table>
          <thead><tr><th>time</th><th>request</th><th>route</th><th>model</th><th>status</th><th class="number">inputs</th><th class="number">ms</th></tr></thead>
          <tbody id="requests">
            {value.requests.map((each) => (
              <>
                <tr>
                  <td>{new Date(each.at * 1000).toLocaleTimeString()}</td>
                  <td><button type="button" class="link" aria-expanded={open === each.id} onClick={() => setOpen(open === each.id ? "" : each.id)}>{each.id}</button></td>
                  <td>{each.endpoint}</td>
                  <td>{each.model}</td>
                  <td>{`${each.status} ${each.code}`}</td>
                  <td class="number">{each.items}</td>
                  <td class="number">{each.total_ms.toFixed(1)}</td>
                </tr>
                {open === each.id && (
                  <tr>
                    <td colSpan={7}>
                      {each.timing ? <Waterfall timing={each.timing} /> : <p class="dim">It did not run.</p>}
                      {each.chunks?.map((chunk) => (
                        <p class="dim">{`${chunk.worker}: a batch of ${chunk.batch.items ?? 0} inputs and ${chunk.batch.tokens ?? 0} tokens, of ${chunk.batch.chunks ?? 0} messages`}</p>
                      ))}
                    </td>
                  </tr>
                )}
              </>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
