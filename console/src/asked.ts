import { useEffect, useState } from "preact/hooks";
import { get, Refusal } from "./api";

const LATE_MS = 3000; // of an answer, after which the page says that there is none

/**
 * What a path answers, asked again `everyMs` after each answer, and never while the page is hidden. What was answered last
 * stays to be read when an answer is missing; `trouble` says why it is.
 */
export function useAsked<T>(path: string, everyMs: number, lateMs = LATE_MS): { value?: T; trouble: string; status: number } {
  const [value, setValue] = useState<T>();
  const [trouble, setTrouble] = useState("");
  const [status, setStatus] = useState(200);
  useEffect(() => {
    let timer = 0;
    let ended = false;
    async function turn() {
      window.clearTimeout(timer);
      if (document.visibilityState === "visible") {
        try {
          const next = await get<T>(path, lateMs);
          if (ended) return;
          setValue(next);
          setTrouble("");
          setStatus(200);
        } catch (error) {
          if (!(error instanceof Refusal)) throw error;
          if (ended) return;
          setTrouble(error.status ? error.message : "no connection, trying again");
          setStatus(error.status);
        }
      }
      if (!ended) timer = window.setTimeout(turn, everyMs);
    }
    void turn();
    return () => {
      ended = true;
      window.clearTimeout(timer);
    };
  }, [path, everyMs, lateMs]);
  return { value, trouble, status };
}
