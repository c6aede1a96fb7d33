import { useState } from "preact/hooks";
import { SIEError } from "sie-client";

/** What a person asks for, one after another: whether it runs, what it said, and why it was refused. `need`: what is said
 * in place of a refusal for want of a key. */
export function useAction(need = "") {
  const [isBusy, setBusy] = useState(false);
  const [notice, setNotice] = useState("");
  const [refusal, setRefusal] = useState("");

  /** `work` returns what is to be said. Returns whether it was done. */
  async function runAction(work: () => Promise<string>): Promise<boolean> {
    setBusy(true);
    setNotice("");
    setRefusal("");
    try {
      setNotice(await work());
      return true;
    } catch (error) {
      if (!(error instanceof SIEError) && !(error instanceof SyntaxError)) throw error;
      const isLacking = need && error instanceof SIEError && (error.status === 401 || error.status === 403);
      setRefusal(isLacking ? need : error.message);
      return false;
    } finally {
      setBusy(false);
    }
  }
  return { isBusy, notice, setNotice, refusal, runAction };
}
