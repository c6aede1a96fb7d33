import { Fragment } from "preact";
import { useEffect, useState } from "preact/hooks";
import { SIEError } from "sie-client";
import { get } from "./api";
import { useAsked } from "./asked";
import type { RequestLog, Slow, SlowRequests } from "./types";
import { Waterfall } from "./waterfall";

const EVERY_MS = 10_000;

/** The slow and failed requests of the last hour, each with where its time went, and one by its id. */
export function Requests() {
  const { value } = useAsked<SlowRequests>("/v1/requests?limit=20", EVERY_MS);
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
  const shown = [...(found ? [found] : []), ...(value?.requests ?? []).filter((each) => each.id !== found?.id)];
  return (
    <>
      <h2>Slow and failed requests of the last hour</h2>
      <form class="row" onSubmit={find}>
        <label>
          X-SIE-Request-ID
          <input id="request" value={wanted} spellcheck={false} autocomplete="off" onInput={(event) => setWanted(event.currentTarget.value)} />
        </label>
        <button type="submit">Find</button>
      </form>
      {trouble && <p class="bad" role="alert">{trouble}</p>}
      {value && !shown.length && <p class="dim">No request of the last hour is kept: none was slow, and none failed.</p>}
      {shown.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Slow requests">
          <table>
            <thead><tr><th>time</th><th>request</th><th>route</th><th>model</th><th>status</th><th class="number">inputs</th><th class="number">ms</th><th>mostly</th></tr></thead>
            <tbody id="requests">{shown.map((each) => <Row key={each.id} request={each} isOpen={open === each.id} onOpen={() => setOpen(open === each.id ? "" : each.id)} />)}</tbody>
          </table>
        </div>
      )}
    </>
  );
}

/** The stage that took most of a request's time, in words. */
function mostly(request: Slow): string {
  const stages = Object.entries(request.timing ?? {}).filter(([name]) => name !== "total_time");
  const [name, ms] = stages.sort((one, other) => other[1] - one[1])[0] ?? ["", 0];
  if (!ms || !request.total_ms) return "";
  return `${name.replace("_time", "").replaceAll("_", " ")} ${Math.round((100 * ms) / request.total_ms)} %`;
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
      </tr>
      {isOpen && (
        <tr class="opened">
          <td colSpan={8}>
            {request.timing ? <Waterfall timing={request.timing} /> : <p class="dim">It did not run.</p>}
            <p class="dim">{[request.lane && `lane ${request.lane}`, request.priority, request.tokens && `${request.tokens} tokens`, request.trace_id && `trace ${request.trace_id}`].filter(Boolean).join(", ")}</p>
            {request.chunks?.map((chunk) => (
              <p class="dim">{`${chunk.worker}: a batch of ${chunk.batch.items ?? 0} inputs and ${chunk.batch.tokens ?? 0} tokens, of ${chunk.batch.chunks ?? 0} messages`}</p>
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
