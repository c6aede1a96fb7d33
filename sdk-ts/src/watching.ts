// Status frames over a WebSocket, which is opened again after a broken connection. Frames in between are lost.

import { abortError, CONNECTION_BUDGET_MS, isMap, sleep } from "./calls.js";
import { health } from "./cluster.js";
import { RequestError, SIEConnectionError, unreadable } from "./errors.js";
import type { Session, WebSocketClass, WebSocketLike } from "./options.js";
import type { StatusFrame } from "./types.js";

const PATH = "/ws/cluster-status";
const RECONNECT_PAUSE_MS = 1_000;
const POLL_INTERVAL_MS = 1_000;
const SILENCE_MS = 30_000; // a connection without a frame for this time is closed: the server sends one each second
const MAX_FRAMES = 16; // maximum number of unread frames; older frames are dropped

/** Yield the status frames of the server, one each second. Throws SIEError. */
export async function* watch(session: Session): AsyncGenerator<StatusFrame, void, undefined> {
  const connector = createConnector(session);
  // a page cannot send an API key with a WebSocket, so it polls /health
  if (session.headers()["authorization"] && !connector.sendsHeaders) return yield* pollHealth(session);
  const budgetMs = session.options.connectionTimeoutMs ?? CONNECTION_BUDGET_MS;
  let brokenMs = -Infinity; // time at which the last connection with a frame ended
  for (;;) {
    // a browser does not say why a handshake was refused; this request has the errors and retries of all requests
    await health(session);
    const reader = new FrameReader(connector.connect(), session.signal);
    let count = 0;
    try {
      for (let frame = await reader.next(); frame; frame = await reader.next()) {
        count += 1;
        yield frame;
      }
    } finally {
      reader.close();
    }
    if (count) brokenMs = performance.now();
    // a gateway that ends may answer /health and refuse the WebSocket
    else if (performance.now() - brokenMs > budgetMs) {
      const message = `the WebSocket ${session.baseUrl}${PATH} was not opened, but /health answers: does a proxy block WebSockets?`;
      throw new SIEConnectionError(message);
    }
    await sleep(RECONNECT_PAUSE_MS, session.signal);
  }
}

/** Yield status frames that are made from the replies of /health. */
async function* pollHealth(session: Session): AsyncGenerator<StatusFrame, void, undefined> {
  for (;;) {
    const { cluster, workers, unhealthy_workers: unhealthy, models } = await health(session);
    yield { timestamp: Date.now() / 1000, cluster, workers: [...workers, ...(unhealthy ?? [])], models };
    await sleep(POLL_INTERVAL_MS, session.signal);
  }
}

/** Choose the WebSocket class. Throws RequestError if there is none. */
function createConnector(session: Session): { sendsHeaders: boolean; connect: () => WebSocketLike } {
  const url = `ws${session.baseUrl.slice("http".length)}${PATH}`;
  const headers = session.headers();
  const optionClass = session.webSocket;
  if (optionClass) return { sendsHeaders: true, connect: () => new optionClass(url, [], { headers }) };
  const { WebSocket: globalClass, process } = globalThis as {
    WebSocket?: WebSocketClass;
    process?: { versions?: { node?: string } };
  };
  if (!globalClass) {
    throw new RequestError("watch needs a WebSocket class: use Node 22, or set the option webSocket, for example to WebSocket of the package ws");
  }
  // the class of Node takes headers in place of protocols; that of a page takes no headers
  if (process?.versions?.node) return { sendsHeaders: true, connect: () => new globalClass(url, { headers }) };
  return { sendsHeaders: false, connect: () => new globalClass(url) };
}

/** Reader of the frames of one connection. */
class FrameReader {
  private readonly frames: StatusFrame[] = [];
  private failure: Error | undefined;
  private hasEnded = false;
  private wake: () => void = () => undefined;

  constructor(private readonly socket: WebSocketLike, private readonly signal: AbortSignal | undefined) {
    const end = () => {
      this.hasEnded = true;
      this.wake();
    };
    socket.onclose = end;
    socket.onerror = end;
    socket.onmessage = (event: { data: unknown }) => {
      try {
        const frame: unknown = JSON.parse(String(event.data));
        if (!isMap(frame)) throw new TypeError("expected a map");
        this.frames.push(frame as StatusFrame);
        if (this.frames.length > MAX_FRAMES) this.frames.shift();
      } catch (error) {
        this.failure = unreadable((error as Error).message, "", error);
      }
      this.wake();
    };
  }

  /**
   * Return the next frame, or undefined if the connection has ended or was silent for SILENCE_MS. Throws SIEAbortError, and
   * ServerError for a frame that is no map.
   */
  async next(): Promise<StatusFrame | undefined> {
    const { signal } = this;
    if (signal?.aborted) throw abortError(signal);
    if (!this.frames.length && !this.hasEnded && !this.failure) {
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, SILENCE_MS);
        this.wake = () => {
          clearTimeout(timer);
          signal?.removeEventListener("abort", this.wake);
          resolve();
        };
        signal?.addEventListener("abort", this.wake, { once: true });
      });
    }
    if (signal?.aborted) throw abortError(signal);
    if (this.failure) throw this.failure;
    return this.frames.shift();
  }

  close(): void {
    this.socket.onmessage = null;
    this.socket.onclose = null;
    this.socket.onerror = () => undefined; // the package `ws` throws an error that no handler receives
    this.socket.close();
  }
}
