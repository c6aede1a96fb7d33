import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { usePolling } from "./polling";
import { Charts, errorsOf } from "./charts";
import { DeadLetters } from "./dead-letters";
import { Doctor } from "./doctor";
import { Placement } from "./placement";
import { RequestPage, Requests } from "./requests";
import { Reservations } from "./reservations";
import { href, type Route } from "./routes";
import { Table } from "./table";
import type { Cluster as State, History } from "./types";
import { formatBytes } from "./format";
import { InlineCode } from "./inline-code";

const EVERY_MS = 1000;
const HISTORY_EVERY_MS = 10_000;
const SETTLED_MS = 5_000; // after which the parts of the page have been read
const LISTED = 8; // findings that are seen at once

/** `route`: of this view, a part of it that is open, or `requests` and an id. */
export function Cluster({ route: { parts, query } }: { route: Route }) {
  const [part = "", id = ""] = parts;
  if (part === "requests" && id) {
    return (
      <section>
        <p class="path"><a href={href("cluster")}>Cluster</a> / <a href={href("cluster", ["requests"])}>Requests</a></p>
        <RequestPage key={id} id={id} />
      </section>
    );
  }
  return <Overview part={part} showsFailed={query.has("failed")} />;
}

function Overview({ part, showsFailed }: { part: string; showsFailed: boolean }) {
  const [filter, setFilter] = useState("");
  const { value: state, trouble } = usePolling<State>(`/v1/cluster?filter=${encodeURIComponent(filter.trim())}`, EVERY_MS);
  const { value: history } = usePolling<History>("/v1/history", HISTORY_EVERY_MS);
  const healthy = (state?.cluster.worker_count ?? 0) > 0;
  const words = trouble || (!state ? "connecting" : healthy ? "healthy" : "degraded: no healthy worker");
  const folded = (name: string, title: string, content: () => ComponentChildren) => <Part name={name} title={title} isWanted={part === name}>{content}</Part>;
  return (
    <section>
      <p><span id="connection" role="status" class={`state ${!trouble && healthy ? "healthy" : "lost"}`}>{words}</span></p>
      {state && trouble && <p class="warn">What follows was known before that.</p>}
      {state && <Figures state={state} />}
      {state && <Attention state={state} history={history} />}
      <div class="row title"><h2>Last hour, at this gateway</h2>{history?.steps.length ? <a href={href("cluster", ["requests"])}>Slowest requests</a> : null}</div>
      {history && <Charts history={history} />}
      <h2>Workers</h2>
      {state && <Workers state={state} />}
      {folded("requests", "Slow and failed requests", () => <Requests key={`${showsFailed}`} showsFailed={showsFailed} />)}
      {folded("queue", "Queue", () => state && <Lanes state={state} />)}
      {folded("models", "Models in use", () => (
        <>
          <label class="row">
            Search
            <input id="filter" type="search" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
          </label>
          {state && <Models state={state} />}
        </>
      ))}
      {folded("placement", "Placement: which worker has which model, and why", () => <Placement />)}
      {folded("pools", "Pools and reservations", () => <Reservations />)}
      {folded("dead-letters", "Dead letters: work that was given up", () => <DeadLetters />)}
      {folded("doctor", "Doctor: checks of every part, with remedies", () => <Doctor />)}
    </section>
  );
}

/** A part that asks for nothing while it is folded. */
function Part({ name, title, isWanted, children }: { name: string; title: string; isWanted: boolean; children: () => ComponentChildren }) {
  const [isOpen, setOpen] = useState(isWanted);
  const place = useRef<HTMLDetailsElement>(null);
  useEffect(() => {
    if (!isWanted) return;
    setOpen(true);
    // what is above it grows while it is read: the part stays in view until somebody moves
    const observer = new ResizeObserver(() => place.current?.scrollIntoView());
    const end = () => observer.disconnect();
    observer.observe(document.body);
    const timer = window.setTimeout(end, SETTLED_MS);
    for (const event of ["wheel", "keydown", "pointerdown"]) window.addEventListener(event, end, { once: true });
    return () => {
      end();
      window.clearTimeout(timer);
      for (const event of ["wheel", "keydown", "pointerdown"]) window.removeEventListener(event, end);
    };
  }, [isWanted]);
  return (
    <details
      class="part" data-part={name} ref={place} open={isOpen}
      onToggle={(event) => {
        const { currentTarget } = event;
        if (event.target !== currentTarget) return; // details within it
        setOpen(currentTarget.open);
      }}
    >
      <summary onClick={() => isOpen || history.replaceState(null, "", href("cluster", [name]))}><h2>{title}</h2></summary>
      {isOpen && children()}
    </details>
  );
}

function Figures({ state }: { state: State }) {
  const waiting = state.queues?.reduce((sum, lane) => sum + lane.messages, 0);
  const rows: [string, string][] = [
    ["workers", `${state.cluster.worker_count}`],
    ["models loaded", `${state.cluster.models_loaded}`],
    ["requests/s", state.cluster.total_qps.toFixed(1)],
    ["in flight", `${state.counts.in_flight}`],
    ["queued", waiting === undefined ? "not known" : `${waiting}`],
    ["dead letters", `${state.counts.dead_letters}`],
    ["version", state.version],
  ];
  return <dl class="figures" id="figures">{rows.map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}</dl>;
}

interface Trouble {
  words: string;
  remedy?: string;
  address: string;
  link: string;
}

const FAILED = href("cluster", ["requests"], { failed: "yes" });
const DOCTOR = { address: href("cluster", ["doctor"]), link: "Ask the doctor" };
/** Where more is told of a finding, by its check. */
const PLACES: Record<string, { address: string; link: string }> = {
  loads: { address: href("models", [], { state: "failed" }), link: "Models that failed" },
  queue: { address: href("cluster", ["queue"]), link: "Queue" },
  refusals: { address: FAILED, link: "Failed requests" },
};

/** What somebody should look at, the worst first. */
function troublesOf({ queues, findings, counts }: State, history: History | undefined): Trouble[] {
  // each cause once: a finding names the code of what it is about, and what could not be loaded has findings of its own
  const isFound = (code: string): boolean => findings.some(({ check, wrong }) => wrong.includes(code) || (check === "loads" && code === "MODEL_LOAD_FAILED"));
  const errors = history ? errorsOf(history).filter(([code]) => !isFound(code)) : [];
  return [
    ...(queues ? [] : [{ words: "The broker did not answer: what waits is not known.", ...DOCTOR }]),
    ...findings.slice(0, LISTED).map(({ check, wrong, fix }) => ({ words: wrong, remedy: fix, ...(PLACES[check] ?? DOCTOR) })),
    ...(findings.length > LISTED ? [{ words: `${findings.length - LISTED} more findings.`, ...DOCTOR }] : []),
    ...(errors.length ? [{ words: `Requests failed in the last hour: ${errors.map(([code, count]) => `${code} ${count}`).join(", ")}.`, address: FAILED, link: "Failed requests" }] : []),
    ...(counts.dead_letters ? [{ words: `${counts.dead_letters} dead letters.`, address: href("cluster", ["dead-letters"]), link: "Dead letters" }] : []),
  ];
}

function Attention({ state, history }: { state: State; history: History | undefined }) {
  const troubles = troublesOf(state, history);
  return (
    <>
      <h2>What needs a look</h2>
      {!troubles.length && <p class="good">✓ Nothing.</p>}
      <ul id="attention">
        {troubles.map(({ words, remedy, address, link }) => (
          <li>
            <InlineCode text={words} /> <a href={address}>{link}</a>
            {remedy && <p class="about">Remedy: <InlineCode text={remedy} /></p>}
          </li>
        ))}
      </ul>
    </>
  );
}

function Lanes({ state }: { state: State }) {
  const rows = (state.queues ?? []).filter((lane) => lane.messages);
  if (!rows.length) return <p class="dim">{state.queues ? "Nothing waits." : "What waits is not known: the broker did not answer."}</p>;
  return (
    <Table label="Queue" columns={["lane", "priority", { number: "messages" }, { number: "oldest, s" }]}>
      {rows.map((lane) => (
        <tr>
          <td class="name">{`${lane.pool}.${lane.machine_profile}.${lane.bundle}`}</td>
          <td>{lane.priority}</td>
          <td class="number">{lane.messages}</td>
          <td class="number">{lane.oldest_s.toFixed(1)}</td>
        </tr>
      ))}
    </Table>
  );
}

type DeviceInfo = NonNullable<State["workers"][number]["devices"]>[number];

/** One device of a worker that has several. */
function Device({ device }: { device: DeviceInfo }) {
  const models = `${device.loaded_models.length} ${device.loaded_models.length === 1 ? "model" : "models"}`;
  return (
    <div title={device.loaded_models.join(", ")}>
      {`${device.device} `}
      {device.ready ? (
        <span class="dim">{`${models}, ${device.queue_depth} in flight`}</span>
      ) : (
        <span class="state unhealthy">no adapter</span>
      )}
    </div>
  );
}

const WORKERS = 8; // that are seen at once

function Workers({ state }: { state: State }) {
  const [showsAll, setShowsAll] = useState(false);
  const shown = showsAll ? state.workers : state.workers.slice(0, WORKERS);
  const rest = state.counts.workers - shown.length;
  if (!state.workers.length) return <p class="dim">No worker has announced itself. Requests wait until one does.</p>;
  return (
    <>
      <Table label="Workers" class="cards" rows={{ id: "workers" }} columns={["worker", "state", "pool", "machine profile", "bundle", "device", "memory", { number: "in flight" }, "loaded models"]}>
        {shown.map((worker) => {
          const health = worker.healthy ? "healthy" : "unhealthy";
          return (
            <tr key={worker.name}>
              <td class="name">{worker.name}</td>
              <td data-label="state"><span class={`state ${health}`}>{health}</span></td>
              <td data-label="pool">{worker.pool}</td>
              <td data-label="machine profile">{worker.gpu}</td>
              <td data-label="bundle">{worker.bundle}</td>
              <td data-label="device">
                {worker.devices?.length ? worker.devices.map((device) => <Device key={device.device} device={device} />) : worker.device}
              </td>
              <td data-label="memory">
                {worker.memory_total_bytes > 0 && (
                  <span>
                    <meter max={worker.memory_total_bytes} value={worker.memory_used_bytes} aria-label={`Memory of ${worker.name}`} />
                    {` ${formatBytes(worker.memory_used_bytes)} of ${formatBytes(worker.memory_total_bytes)}`}
                  </span>
                )}
              </td>
              <td data-label="in flight" class="number">{worker.queue_depth}</td>
              <td data-label="loaded models" class="wrap">{worker.loaded_models.join(", ")}</td>
            </tr>
          );
        })}
      </Table>
      {rest > 0 && !showsAll && state.workers.length > WORKERS && <button type="button" class="link" onClick={() => setShowsAll(true)}>{`Show ${state.workers.length - WORKERS} more workers`}</button>}
      {rest > 0 && (showsAll || state.workers.length <= WORKERS) && <p class="dim">{`${rest} more workers`}</p>}
    </>
  );
}

function Models({ state }: { state: State }) {
  const rest = state.counts.models - state.models.length;
  return (
    <>
      <Table label="Models" class="cards" rows={{ id: "models" }} isTall columns={["model", "state", { number: "workers" }, "machine profiles", { number: "queue" }]}>
        {state.models.map((model) => (
          <tr key={model.name}>
            <td class="name"><a href={href("models", [model.name])}>{model.name}</a></td>
            <td data-label="state" class="wrap">
              <span class={`state ${model.state}`}>{model.state === "available" ? "not loaded" : model.state}</span>
              {model.state === "failed" && <p class="dim failure">{state.failures[model.name] ?? ""}</p>}
            </td>
            <td data-label="workers" class="number">{model.worker_count}</td>
            <td data-label="machine profiles">{model.gpu_types.join(", ")}</td>
            <td data-label="queue" class="number">{model.total_queue_depth}</td>
          </tr>
        ))}
      </Table>
      {!state.models.length && <p class="dim">No model has this in its name.</p>}
      {rest > 0 && <p class="dim">{`${rest} more models`}</p>}
    </>
  );
}
