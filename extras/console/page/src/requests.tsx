import { useEffect, useState } from "preact/hooks";
import { SIEError } from "sie-client";
import { getJson } from "./api";
import { usePolling } from "./polling";
import { navigate, href } from "./routes";
import { Table } from "./table";
import type { RequestLog, SlowRequest, SlowRequests } from "./types";
import { stagesOf } from "./stages";
import { Waterfall } from "./waterfall";

const EVERY_MS = 10_000;
const MAX_SHOWN = 12;
const MAX_REQUESTS = 1000; // the largest limit that the gateway accepts

/** The slow and failed requests of the last hour, and a field that finds a request by its id. */
export function Requests({ showsFailed }: { showsFailed: boolean }) {
  const [onlyFailed, setOnlyFailed] = useState(showsFailed); // most failed requests are not among the slowest
  const { value, error } = usePolling<SlowRequests>(`/v1/requests?limit=${onlyFailed ? MAX_REQUESTS : MAX_SHOWN}`, EVERY_MS);
  const [search, setSearch] = useState("");
  const requests = (value?.requests ?? []).filter((request) => !onlyFailed || request.code);
  if (onlyFailed) requests.sort((first, second) => second.at - first.at);
  const shown = requests.slice(0, MAX_SHOWN);
  return (
    <>
      <form
        class="row"
        onSubmit={(event) => {
          event.preventDefault();
          if (search.trim()) navigate(href("cluster", ["requests", search.trim()]));
        }}
      >
        <label>
          Find a request by its X-SIE-Request-ID
          <input id="request" value={search} spellcheck={false} autocomplete="off" onInput={(event) => setSearch(event.currentTarget.value)} />
        </label>
        <button type="submit">Find</button>
        <label class={`chip ${onlyFailed ? "on" : ""}`}>
          <input id="failed" type="checkbox" checked={onlyFailed} onChange={(event) => setOnlyFailed(event.currentTarget.checked)} />
          Only failed ones, the newest first
        </label>
      </form>
      {error && <p class="bad" role="alert">{error}</p>}
      {value && !shown.length && <p class="dim">{onlyFailed ? "No failed request of the last hour is kept." : "No request of the last hour is kept: none was slow, and none failed."}</p>}
      <ByWorker requests={requests} />
      {shown.length > 0 && (
        <Table label="Slow requests" class="cards" rows={{ id: "requests" }} columns={["request", "time", "verb, model", "status", { number: "inputs" }, { number: "ms" }, "longest stage"]}>
          {shown.map((request) => <Row key={request.id} request={request} />)}
        </Table>
      )}
    </>
  );
}

/** Return the longest stage of a request, with its share of the time. */
function longestStage(request: SlowRequest): string {
  const stages = stagesOf(request.timing ?? {});
  const [name, ms] = stages.sort((first, second) => second[1] - first[1])[0] ?? ["", 0];
  if (!ms || !request.total_ms) return "";
  return `${name} ${Math.round((100 * ms) / request.total_ms)} %`;
}

const SLOW_RATIO = 1.5; // to the other workers of a model

/** The parts of requests for a model that one worker ran. */
interface WorkerShare { model: string; worker: string; parts: number; workerMs: number; inferenceMs: number; tokens: number }

/** Return the milliseconds of inference for 1,000 tokens, 0 if the tokens are not known. */
const msPer1000Tokens = (shares: WorkerShare[]): number => {
  const [ms, tokens] = shares.reduce(([ms, tokens], share) => [ms + share.inferenceMs, tokens + share.tokens], [0, 0] as [number, number]);
  return tokens ? (1000 * ms) / tokens : 0;
};

/** The share of each worker in these requests. Only models that several workers ran are shown: with one worker, a slow
 * worker looks like a slow model. */
function ByWorker({ requests }: { requests: SlowRequest[] }) {
  const models = new Map<string, Map<string, WorkerShare>>();
  for (const { model, chunks } of requests) {
    const workers = models.get(model) ?? new Map<string, WorkerShare>();
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
      .map((share) => {
        const [ownMs, otherMs] = [msPer1000Tokens([share]), msPer1000Tokens(shares.filter((entry) => entry !== share))];
        return { ...share, ownMs, ratio: ownMs && otherMs ? ownMs / otherMs : 0 };
      })
      .sort((first, second) => second.ratio - first.ratio);
  });
  if (!rows.length) return null;
  return (
    <Table label="These requests by worker" class="narrow" rows={{ id: "by-worker" }} columns={["model", "worker", { number: "of these requests" }, { number: "mean time at the worker, ms" }, { number: "inference of 1,000 tokens, ms" }, { number: "ratio to the other workers" }]}>
      {rows.map(({ model, worker, parts, workerMs, ownMs, ratio }, index) => (
        <tr key={`${model} ${worker}`}>
          <td>{rows[index - 1]?.model === model ? "" : model}</td><td>{worker}</td><td class="number">{parts}</td>
          <td class="number">{(workerMs / parts).toFixed(0)}</td><td class="number">{ownMs ? ownMs.toFixed(0) : ""}</td>
          <td class={ratio >= SLOW_RATIO ? "number bad" : "number"}>{ratio ? `${ratio.toFixed(1)}${ratio >= SLOW_RATIO ? ", slow" : ""}` : ""}</td>
        </tr>
      ))}
    </Table>
  );
}

/** A row of the list of requests. */
function Row({ request }: { request: SlowRequest }) {
  return (
    <tr>
      <td><a href={href("cluster", ["requests", request.id])}>{request.id}</a></td>
      <td data-label="time">{new Date(request.at * 1000).toLocaleTimeString()}</td>
      <td data-label="verb, model" class="wrap">{`${request.endpoint} ${request.model}`}</td>
      <td data-label="status"><span class={request.code ? "bad" : ""}>{`${request.status} ${request.code}`}</span></td>
      <td data-label="inputs" class="number">{request.items}</td>
      <td data-label="ms" class="number">{request.total_ms.toFixed(1)}</td>
      <td data-label="longest stage">{longestStage(request)}</td>
    </tr>
  );
}

/** The page of a request: its stages, its batches, and its lines in the log. */
export function RequestPage({ id }: { id: string }) {
  const [request, setRequest] = useState<SlowRequest>();
  const [readError, setReadError] = useState("");
  useEffect(() => {
    let ended = false;
    getJson<SlowRequest>(`/v1/requests/${encodeURIComponent(id)}`).then(
      (request) => !ended && setRequest(request),
      (error: unknown) => {
        if (!(error instanceof SIEError)) throw error;
        if (!ended) setReadError(error.message);
      },
    );
    return () => {
      ended = true;
    };
  }, [id]);
  if (!request) return readError ? <><p class="bad" role="alert">{readError}</p><Log id={id} /></> : <p class="dim" role="status">reading the request</p>;
  const facts: [string, string][] = [
    ["time", new Date(request.at * 1000).toLocaleString()],
    ["status", `${request.status} ${request.code}`],
    ["took", `${request.total_ms.toFixed(1)} ms`],
    ["longest stage", longestStage(request)],
    ["inputs", `${request.items}${request.tokens ? `, ${request.tokens} tokens` : ""}`],
    ["truncated", request.truncated ? `${request.truncated} of ${request.items}: longer than the model reads` : ""],
    ["batches", batchSummary(request)],
    ["lane", [request.lane, request.priority].filter(Boolean).join(", ")],
    ["trace", request.trace_id],
  ];
  return (
    <article class="detail request">
      <h2>{`${request.endpoint} ${request.model}`}</h2>
      <p class="dim">{request.id}</p>
      {request.message && <p class="bad">{request.message}</p>}
      <dl class="facts">{facts.filter(([, value]) => value).map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
      <h3>Where the time went</h3>
      {request.timing ? <Waterfall timing={request.timing} /> : <p class="dim">No worker ran this request.</p>}
      {batchCounts(request).map(([text, count]) => <p class="dim">{count > 1 ? `${count} times: ${text}` : text}</p>)}
      {request.model && <p><a href={href("models", [request.model])}>{`About ${request.model}`}</a></p>}
      <Log id={request.id} />
    </article>
  );
}

/** Return the number of batches and workers of a request as text, empty for one batch. */
function batchSummary({ items, chunks = [] }: SlowRequest): string {
  const batches = new Set(chunks.map(({ worker, batch }) => `${worker} ${batch.id}`)).size;
  const workers = new Set(chunks.map(({ worker }) => worker)).size;
  return batches > 1 ? `${items} inputs ran in ${batches} batches of ${workers === 1 ? "one worker" : `${workers} workers`}` : "";
}

/** Return the texts that describe the batches of a request, with the number of batches of each text. */
function batchCounts({ chunks = [] }: SlowRequest): [string, number][] {
  const counts = new Map<string, number>();
  for (const { worker, batch } of chunks) {
    if (!batch.items) continue;
    const text = `${worker}: a batch of ${batch.items} inputs and ${batch.tokens ?? 0} tokens${(batch.chunks ?? 1) > 1 ? `, of ${batch.chunks} requests or parts of them` : ""}`;
    counts.set(text, (counts.get(text) ?? 0) + 1);
  }
  return [...counts];
}

/** The lines of the gateway's log for a request. */
function Log({ id }: { id: string }) {
  const [text, setText] = useState("");
  useEffect(() => {
    let ended = false;
    async function read() {
      try {
        const { lines } = await getJson<RequestLog>(`/v1/requests/${encodeURIComponent(id)}/log`);
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
  return text ? <><h3>Log of this gateway</h3><pre class="code log">{text}</pre></> : null;
}
