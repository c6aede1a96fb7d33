import { useState } from "preact/hooks";
import { SIEError } from "sie-client";

/** What a person asks for, one after another: whether it runs, what it said, and why it was refused. */
export function useAttempts() {
  const [isBusy, setBusy] = useState(false);
  const [said, setSaid] = useState("");
  const [refusal, setRefusal] = useState("");

  /** `work` returns what is to be said. Returns whether it was done. */
  async function attempt(work: () => Promise<string>): Promise<boolean> {
    setBusy(true);
    setSaid("");
    setRefusal("");
    try {
      setSaid(await work());
      return true;
    } catch (error) {
      if (!(error instanceof SIEError)) throw error;
      setRefusal(error.message);
      return false;
    } finally {
      setBusy(false);
    }
  }
  return { isBusy, said, refusal, attempt };
}
