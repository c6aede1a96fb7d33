import { useEffect, useState } from "preact/hooks";
import { type CallOptions, SIEAbortError, SIEConnectionError, SIEError } from "sie-client";
import { getJson } from "./api";

const SLOW_MS = 3000; // a reply that takes longer is late
const TIMEOUT_MS = 15_000; // of each request
const LATE = `no answer for ${SLOW_MS / 1000} s, waiting`;

/** Request a path, or call the client, again and again: `everyMs` after each reply, never while the page is hidden, and at
 * once when `refreshes` changes. `source` is a path or a function that is the same in each render. `value` is the last
 * reply; it stays when a later reply is late or fails, and `error` then has the reason. */
export function usePolling<T>(source: string | ((options: CallOptions) => Promise<T>), everyMs: number, refreshes = 0): { value?: T; error: string } {
  const [value, setValue] = useState<T>();
  const [error, setError] = useState("");
  useEffect(() => {
    let timer = 0;
    let lateTimer = 0;
    let ended = false;
    async function poll() {
      window.clearTimeout(timer);
      if (document.visibilityState === "visible") {
        lateTimer = window.setTimeout(() => setError(LATE), SLOW_MS);
        try {
          const next = await (typeof source === "string" ? getJson<T>(source, TIMEOUT_MS) : source({ signal: AbortSignal.timeout(TIMEOUT_MS) }));
          if (ended) return;
          setValue(next);
          setError("");
        } catch (failure) {
          if (!(failure instanceof SIEError)) throw failure;
          if (ended) return;
          setError(failure instanceof SIEAbortError ? LATE : failure instanceof SIEConnectionError ? "no connection, trying again" : failure.message);
        } finally {
          window.clearTimeout(lateTimer);
        }
      }
      if (!ended) timer = window.setTimeout(poll, everyMs);
    }
    void poll();
    return () => {
      ended = true;
      window.clearTimeout(timer);
      window.clearTimeout(lateTimer);
    };
  }, [source, everyMs, refreshes]);
  return { value, error };
}
