import { useState } from "preact/hooks";
import { SIEError } from "sie-client";

/** The state of the actions that a user starts by a button, one at a time: `notice` is the result of the last one,
 * `refusal` its error. `missingScope` replaces the error if the key lacks the scope. */
export function useAction(missingScope = "") {
  const [isBusy, setBusy] = useState(false);
  const [notice, setNotice] = useState("");
  const [refusal, setRefusal] = useState("");

  /** Run `work`, which returns the notice, then `refresh`, whose failure leaves the notice. Return true if both succeeded. */
  async function runAction(work: () => Promise<string>, refresh?: () => Promise<void>): Promise<boolean> {
    setBusy(true);
    setNotice("");
    setRefusal("");
    try {
      setNotice(await work());
      await refresh?.();
      return true;
    } catch (error) {
      if (!(error instanceof SIEError) && !(error instanceof SyntaxError)) throw error;
      const lacksScope = missingScope && error instanceof SIEError && (error.status === 401 || error.status === 403);
      setRefusal(lacksScope ? missingScope : error.message);
      return false;
    } finally {
      setBusy(false);
    }
  }
  return { isBusy, notice, setNotice, refusal, runAction };
}
