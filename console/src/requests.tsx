import { Fragment } from "preact";
import { useEffect, useState } from "preact/hooks";
import { SIEError } from "sie-client";
import { get } from "./api";
import { useAsked } from "./asked";
import type { RequestLog, Slow, SlowRequests } from "./types";
import { stagesOf, Waterfall } from "./waterfall";

const EVERY_MS = 10_000;
const SLOWEST = 20;
const KEPT = 1000; // all that a gateway keeps

/** The slow and failed requests of the last hour, each with where its time went, and one by its id. */
export function Requests() {
  const [onlyFailed, setOnlyFailed] = useState(false); // most of them are fast, and not among the slowest
  const { value } = useAsked<SlowRequests>(`/v1/requests?limit=${onlyFailed ? KEPT : SLOWEST}`, EVERY_MS);
  const [open, setOpen] = useState("");
  const [wanted, setWanted] = useState("");
  const [found, setFound] = useState<Slow>();
  const [trouble, setTrouble] = useState("");
  async function find(event: Event) {
    event.preventDefault();
    setFound(undefined);
    setTrouble("");
    if (!wanted.trim()) return;
    try {
      const request = await get<Slow>(`/v1/requests/${encodeURIComponent(wanted.trim())}`);
      setFound(request);
      setOpen(request.id);
    } catch (error) {
      if (!(error instanceof SIEError)) throw error;
      setTrouble(error.message);
    }
  }
  const kept = (value?.requests ?? []).filter((each) => !onlyFailed || each.code);
  if (onlyFailed) kept.sort((one, other) => other.at - one.at);
  const shown = [...(found ? [found] : []), ...kept.filter((each) => each.id !== found?.id)];
  return (
    <>
      <h2>Slow and failed requests of the last hour</h2>
      <form class="row" onSubmit={find}>
        <label>
          X-SIE-Request-ID
          <input id="request" value={wanted} spellcheck={false} autocomplete="off" onInput={(event) => setWanted(event.currentTarget.value)} />
        </label>
        <button type="submit">Find</button>
        <label class={`chip ${onlyFailed ? "on" : ""}`}>
          <input id="failed" type="checkbox" checked={onlyFailed} onChange={(event) => setOnlyFailed(event.currentTarget.checked)} />
          Only failed ones, the newest first
        </label>
      </form>
      {trouble && <p class="bad" role="alert">{trouble}</p>}
      {value && !shown.length && <p class="dim">{onlyFailed ? "No failed request of the last hour is kept." : "No request of the last hour is kept: none was slow, and none failed."}</p>}
      <ByWorker requests={kept} />
      {shown.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Slow requests">
          <table>
            <thead><tr><th>time</th><th>request</th><th>route</th><th>model</th><th>status</th><th class="number">inputs</th><th class="number">ms</th><th>mostly</th><th>worker</th></tr></thead>
            <tbody id="requests">{shown.map((each) => <Row key={each.id} request={each} isOpen={open === each.id} onOpen={() => setOpen(open === each.id ? "" : each.id)} />)}</tbody>
          </table>
        </div>
      )}
    </>
  );
}

/** The stage that took most of a request's time, in words. */
function mostly(request: Slow): string {
  const stages = stagesOf(request.timing ?? {}, request.chunks);
  const [name, ms] = stages.sort((one, other) => other[1] - one[1])[0] ?? ["", 0];
  if (!ms || !request.total_ms) return "";
  return `${name} ${Math.round((100 * ms) / request.total_ms)} %`;
}

const SLOW = 1.5; // times what the other workers of a model take

interface Share { model: string; worker: string; parts: number; workerMs: number; inferenceMs: number; tokens: number }

/** Milliseconds of inference for 1,000 tokens, 0 where nobody knows. */
const pace = (shares: Share[]): number => {
  const [ms, tokens] = shares.reduce(([ms, tokens], one) => [ms + one.inferenceMs, tokens + one.tokens], [0, 0] as [number, number]);
  return tokens ? (1000 * ms) / tokens : 0;
};

/** What each worker had of these requests, for each model that several workers ran: only there a slow worker can be told
 * from a slow model. */
function ByWorker({ requests }: { requests: Slow[] }) {
  const models = new Map<string, Map<string, Share>>();
  for (const { model, chunks } of requests) {
    const workers = models.get(model) ?? new Map<string, Share>();
    models.set(model, workers);
    for (const { worker, batch, stages } of chunks ?? []) {
      const sum = workers.get(worker) ?? { model, worker, parts: 0, workerMs: 0, inferenceMs: 0, tokens: 0 };
      workers.set(worker, {
        ...sum,
        parts: sum.parts + 1,
        workerMs: sum.workerMs + (stages.worker_ms ?? 0),
        inferenceMs: sum.inferenceMs + (stages.inference_ms ?? 0),
        tokens: sum.tokens + (batch.tokens ?? 0),
      });
    }
  }
  const rows = [...models.values()].filter((workers) => workers.size > 1).flatMap((workers) => {
    const shares = [...workers.values()];
    return shares
      .map((one) => {
        const [own, others] = [pace([one]), pace(shares.filter((each) => each !== one))];
        return { ...one, own, times: own && others ? own / others : 0 };
      })
      .sort((one, other) => other.times - one.times);
  });
  if (!rows.length) return null;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="These requests by worker">
      <table class="narrow">
        <thead><tr><th>model</th><th>worker</th><th class="number">of these requests</th><th class="number">mean time there, ms</th><th class="number">inference of 1,000 tokens, ms</th><th class="number">times that of the others</th></tr></thead>
        <tbody id="by-worker">
          {rows.map(({ model, worker, parts, workerMs, own, times }, place) => (
            <tr key={`${model} ${worker}`}>
              <td>{rows[place - 1]?.model === model ? "" : model}</td><td>{worker}</td><td class="number">{parts}</td>
              <td class="number">{(workerMs / parts).toFixed(0)}</td><td class="number">{own ? own.toFixed(0) : ""}</td>
              <td class={times >= SLOW ? "number bad" : "number"}>{times ? `${times.toFixed(1)}${times >= SLOW ? ", slow" : ""}` : ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Row({ request, isOpen, onOpen }: { request: Slow; isOpen: boolean; onOpen: () => void }) {
  return (
    <Fragment>
      <tr>
        <td>{new Date(request.at * 1000).toLocaleTimeString()}</td>
        <td><button type="button" class="link" aria-expanded={isOpen} onClick={onOpen}>{request.id}</button></td>
        <td>{request.endpoint}</td>
        <td class="name">{request.model}</td>
        <td>{`${request.status} ${request.code}`}</td>
        <td class="number">{request.items}</td>
        <td class="number">{request.total_ms.toFixed(1)}</td>
        <td>{mostly(request)}</td>
        <td>{[...new Set(request.chunks?.map((chunk) => chunk.worker))].join(", ")}</td>
      </tr>
      {isOpen && (
        <tr class="opened">
          <td colSpan={9}>
            {request.message && <p class="bad">{request.message}</p>}
            {request.timing ? <Waterfall timing={request.timing} parts={request.chunks} /> : <p class="dim">It did not run.</p>}
            <p class="dim">{[request.lane && `lane ${request.lane}`, request.priority, request.tokens && `${request.tokens} tokens`, request.trace_id && `trace ${request.trace_id}`].filter(Boolean).join(", ")}</p>
            {request.chunks?.filter((chunk) => chunk.batch.items).map((chunk) => (
              <p class="dim">{`${chunk.worker}: a batch of ${chunk.batch.items ?? 0} inputs and ${chunk.batch.tokens ?? 0} tokens, of ${chunk.batch.chunks ?? 0} message${chunk.batch.chunks === 1 ? "" : "s"}`}</p>
            ))}
            <Log id={request.id} />
          </td>
        </tr>
      )}
    </Fragment>
  );
}

/** What the gateway's log says of a request. */
function Log({ id }: { id: string }) {
  const [text, setText] = useState("");
  useEffect(() => {
    let ended = false;
    async function read() {
      try {
        const { lines } = await get<RequestLog>(`/v1/requests/${encodeURIComponent(id)}/log`);
        if (!ended) setText(lines.map((line) => `${new Date(line.at * 1000).toISOString()} ${line.level} ${line.logger}: ${line.message}`).join("\n"));
      } catch (error) {
        if (!(error instanceof SIEError)) throw error;
        if (!ended) setText(error.message);
      }
    }
    void read();
    return () => {
      ended = true;
    };
  }, [id]);
  return text ? <pre class="code log">{text}</pre> : null;
}
