// Status frames over a websocket, across reconnections; the frames in between are not seen.

import { aborted, isMap, sleep } from "./calls.js";
import { health } from "./cluster.js";
import { RequestError, SIEConnectionError, unreadable } from "./errors.js";
import type { Session, WebSocketClass, WebSocketLike } from "./options.js";
import type { StatusFrame } from "./types.js";

const PATH = "/ws/cluster-status";
const AGAIN_AFTER_MS = 1_000; // a connection broke
const EVERY_MS = 1_000;
const SILENCE_MS = 30_000; // the server sends every second; a connection that says nothing for so long is dead
const MAX_KEPT = 16; // of frames that are not read: older ones are dropped

export async function* watch(session: Session): AsyncGenerator<StatusFrame, void, undefined> {
  const { apiKey } = session;
  const open = connector(session);
  // a page cannot send a key with a websocket: it asks for the same every second
  if (apiKey && !open.sendsHeaders) return yield* frames(session);
  for (;;) {
    // the errors, the patience and the retries of a request: a refused handshake tells a client of a browser nothing
    await health(session);
    const socket = new Frames(open.connect(), session.signal);
    let count = 0;
    try {
      for (let frame = await socket.next(); frame; frame = await socket.next()) {
        count += 1;
        yield frame;
      }
    } finally {
      socket.close();
    }
    if (!count) {
      const message = `the websocket ${session.baseUrl}${PATH} was not opened, where /health answers: is a proxy in between?`;
      throw new SIEConnectionError(message);
    }
    await sleep(AGAIN_AFTER_MS, session.signal);
  }
}

async function* frames(session: Session): AsyncGenerator<StatusFrame, void, undefined> {
  for (;;) {
    const { cluster, workers, unhealthy_workers: unhealthy, models } = await health(session);
    yield { timestamp: Date.now() / 1000, cluster, workers: [...workers, ...(unhealthy ?? [])], models };
    await sleep(EVERY_MS, session.signal);
  }
}

function connector(session: Session): { sendsHeaders: boolean; connect: () => WebSocketLike } {
  const url = `ws${session.baseUrl.slice("http".length)}${PATH}`;
  const headers = session.headers();
  const own = session.webSocket;
  if (own) return { sendsHeaders: true, connect: () => new own(url, [], { headers }) };
  const { WebSocket: shared, process } = globalThis as {
    WebSocket?: WebSocketClass;
    process?: { versions?: { node?: string } };
  };
  if (!shared) {
    throw new RequestError("watch needs a websocket: Node 22, or the option webSocket, such as WebSocket of the package ws");
  }
  // the one of Node takes headers in place of protocols, that of a page takes none
  if (process?.versions?.node) return { sendsHeaders: true, connect: () => new shared(url, { headers }) };
  return { sendsHeaders: false, connect: () => new shared(url) };
}

/** The frames of one connection; none when it has ended. */
class Frames {
  private readonly kept: StatusFrame[] = [];
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
        this.kept.push(frame as StatusFrame);
        if (this.kept.length > MAX_KEPT) this.kept.shift();
      } catch (error) {
        this.failure = unreadable((error as Error).message, "", error);
      }
      this.wake();
    };
  }

  /** Throws SIEAbortError, and ServerError for a frame that is no map. */
  async next(): Promise<StatusFrame | undefined> {
    const { signal } = this;
    if (signal?.aborted) throw aborted(signal);
    if (!this.kept.length && !this.hasEnded && !this.failure) {
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
    if (signal?.aborted) throw aborted(signal);
    if (this.failure) throw this.failure;
    return this.kept.shift();
  }

  close(): void {
    this.socket.onmessage = null;
    this.socket.onclose = null;
    this.socket.onerror = () => undefined; // of `ws`, which throws what nobody listens to
    this.socket.close();
  }
}
