import { useEffect, useState } from "preact/hooks";
import { type CallOptions, SIEError } from "sie-client";
import { getJson } from "./api";

const LATE_MS = 3000; // of an answer, after which the page says that there is none

/**
 * What a path answers, or a call of the client (always the same function), asked again `everyMs` after each answer, and
 * never while the page is hidden. What was answered last stays to be read when an answer is missing; `trouble` says why.
 * Another `look` asks at once.
 */
export function usePolling<T>(source: string | ((options: CallOptions) => Promise<T>), everyMs: number, look = 0): { value?: T; trouble: string } {
  const [value, setValue] = useState<T>();
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    let timer = 0;
    let ended = false;
    async function turn() {
      window.clearTimeout(timer);
      if (document.visibilityState === "visible") {
        try {
          const next = await (typeof source === "string" ? getJson<T>(source, LATE_MS) : source({ signal: AbortSignal.timeout(LATE_MS) }));
          if (ended) return;
          setValue(next);
          setTrouble("");
        } catch (error) {
          if (!(error instanceof SIEError)) throw error;
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
  }, [source, everyMs, look]);
  return { value, trouble };
}
