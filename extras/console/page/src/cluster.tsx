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
const SETTLED_MS = 5_000; // the parts of the page have loaded by then
const MAX_FINDINGS = 8; // more are behind a link

/** The state of the cluster. The route has the part to open, or `requests` and the id of a request. */
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

/** The health of the cluster, its problems, the last hour, the workers, and the folded parts. */
function Overview({ part, showsFailed }: { part: string; showsFailed: boolean }) {
  const [filter, setFilter] = useState("");
  const { value: state, error } = usePolling<State>(`/v1/cluster?filter=${encodeURIComponent(filter.trim())}`, EVERY_MS);
  const { value: history, error: historyError } = usePolling<History>("/v1/history", HISTORY_EVERY_MS);
  const healthy = (state?.cluster.worker_count ?? 0) > 0;
  const stateText = error || (!state ? "connecting" : healthy ? "healthy" : "degraded: no healthy worker");
  const folded = (name: string, title: string, content: () => ComponentChildren) => <Part name={name} title={title} isTarget={part === name}>{content}</Part>;
  return (
    <section>
      <p><span id="connection" role="status" class={`state ${!error && healthy ? "healthy" : "lost"}`}>{stateText}</span></p>
      {state && error && <p class="warn">The figures below are from the last reply.</p>}
      {state && <Figures state={state} />}
      {state && <Attention state={state} history={history} />}
      <div class="row title"><h2>Last hour, at this gateway</h2>{history?.steps.length ? <a href={href("cluster", ["requests"])}>Slowest requests</a> : null}</div>
      {historyError && !error && <p class="bad" role="alert">{historyError}</p>}
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

/** A folded part of the page. It sends no requests while it is folded. */
function Part({ name, title, isTarget, children }: { name: string; title: string; isTarget: boolean; children: () => ComponentChildren }) {
  const [isOpen, setOpen] = useState(isTarget);
  const details = useRef<HTMLDetailsElement>(null);
  useEffect(() => {
    if (!isTarget) return;
    setOpen(true);
    // The parts above grow while they load, so this part is scrolled into view until the user acts or SETTLED_MS is over.
    const observer = new ResizeObserver(() => details.current?.scrollIntoView());
    const end = () => observer.disconnect();
    observer.observe(document.body);
    const timer = window.setTimeout(end, SETTLED_MS);
    for (const event of ["wheel", "keydown", "pointerdown"]) window.addEventListener(event, end, { once: true });
    return () => {
      end();
      window.clearTimeout(timer);
      for (const event of ["wheel", "keydown", "pointerdown"]) window.removeEventListener(event, end);
    };
  }, [isTarget]);
  return (
    <details
      class="part" data-part={name} ref={details} open={isOpen}
      onToggle={(event) => {
        const { currentTarget } = event;
        if (event.target !== currentTarget) return; // an element inside this part
        setOpen(currentTarget.open);
      }}
    >
      <summary onClick={() => isOpen || history.replaceState(null, "", href("cluster", [name]))}><h2>{title}</h2></summary>
      {isOpen && children()}
    </details>
  );
}

/** The figures of the whole cluster. */
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

/** A problem of the cluster, with its remedy and a link to the part that shows more. */
interface Problem {
  text: string;
  remedy?: string;
  address: string;
  link: string;
}

const FAILED = href("cluster", ["requests"], { failed: "yes" });
const DOCTOR = { address: href("cluster", ["doctor"]), link: "Ask the doctor" };
/** The part that shows more about the findings of a check. */
const CHECK_LINKS: Record<string, { address: string; link: string }> = {
  loads: { address: href("models", [], { state: "failed" }), link: "Models that failed" },
  queue: { address: href("cluster", ["queue"]), link: "Queue" },
  refusals: { address: FAILED, link: "Failed requests" },
};

/** Return the problems of the cluster: the broker, findings, failed requests, dead letters. */
function problemsOf({ queues, findings, counts }: State, history: History | undefined): Problem[] {
  // An error that a finding names is not listed again. The check `loads` covers all failed loads.
  const hasFinding = (code: string): boolean => findings.some(({ check, wrong }) => wrong.includes(code) || (check === "loads" && code === "MODEL_LOAD_FAILED"));
  const errors = history ? errorsOf(history).filter(([code]) => !hasFinding(code)) : [];
  return [
    ...(queues ? [] : [{ text: "The broker did not answer: the queue is not known.", ...DOCTOR }]),
    ...findings.slice(0, MAX_FINDINGS).map(({ check, wrong, fix }) => ({ text: wrong, remedy: fix, ...(CHECK_LINKS[check] ?? DOCTOR) })),
    ...(findings.length > MAX_FINDINGS ? [{ text: `${findings.length - MAX_FINDINGS} more findings.`, ...DOCTOR }] : []),
    ...(errors.length ? [{ text: `Requests failed in the last hour: ${errors.map(([code, count]) => `${code} ${count}`).join(", ")}.`, address: FAILED, link: "Failed requests" }] : []),
    ...(counts.dead_letters ? [{ text: `${counts.dead_letters} dead letters.`, address: href("cluster", ["dead-letters"]), link: "Dead letters" }] : []),
  ];
}

/** The problems that need a look. */
function Attention({ state, history }: { state: State; history: History | undefined }) {
  const problems = problemsOf(state, history);
  return (
    <>
      <h2>What needs a look</h2>
      {!problems.length && <p class="good">✓ Nothing.</p>}
      <ul id="attention">
        {problems.map(({ text, remedy, address, link }) => (
          <li>
            <InlineCode text={text} /> <a href={address}>{link}</a>
            {remedy && <p class="about">Remedy: <InlineCode text={remedy} /></p>}
          </li>
        ))}
      </ul>
    </>
  );
}

/** The messages that wait in each lane. */
function Lanes({ state }: { state: State }) {
  const rows = (state.queues ?? []).filter((lane) => lane.messages);
  if (!rows.length) return <p class="dim">{state.queues ? "Nothing waits." : "The broker did not answer: the queue is not known."}</p>;
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

/** A device of a worker that has several. */
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

const MAX_WORKERS = 8; // more are behind a button

/** The workers, with a button for those beyond the first. */
function Workers({ state }: { state: State }) {
  const [showsAll, setShowsAll] = useState(false);
  const shown = showsAll ? state.workers : state.workers.slice(0, MAX_WORKERS);
  const hidden = state.counts.workers - shown.length;
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
      {hidden > 0 && !showsAll && state.workers.length > MAX_WORKERS && <button type="button" class="link" onClick={() => setShowsAll(true)}>{`Show ${state.workers.length - MAX_WORKERS} more workers`}</button>}
      {hidden > 0 && (showsAll || state.workers.length <= MAX_WORKERS) && <p class="dim">{`${hidden} more workers`}</p>}
    </>
  );
}

/** The models in use, as `state` has them for the present filter. */
function Models({ state }: { state: State }) {
  const hidden = state.counts.models - state.models.length;
  return (
    <>
      <Table label="Models" class="cards" rows={{ id: "models" }} isTall columns={["model", "state", { number: "workers" }, "machine profiles", { number: "queue" }]}>
        {state.models.map((model) => (
          <tr key={model.name}>
            <td class="name"><a href={href("models", [model.name])}>{model.name}</a></td>
            <td data-label="state" class="wrap">
              <span class={`state ${model.state}`}>{model.state === "available" ? "not loaded" : model.state}</span>
              {model.state === "failed" && <p class="dim failure">{Object.hasOwn(state.failures, model.name) && state.failures[model.name]}</p>}
            </td>
            <td data-label="workers" class="number">{model.worker_count}</td>
            <td data-label="machine profiles">{model.gpu_types.join(", ")}</td>
            <td data-label="queue" class="number">{model.total_queue_depth}</td>
          </tr>
        ))}
      </Table>
      {!state.models.length && <p class="dim">No model in use has this in its name.</p>}
      {hidden > 0 && <p class="dim">{`${hidden} more models`}</p>}
    </>
  );
}
