import { useState } from "preact/hooks";
import { SIEError } from "sie-client";
import { get } from "./api";
import type { Report } from "./types";

const LIMIT_MS = 60_000;
const WORDS = { fine: "fine", wrong: "wrong", absent: "not there", blind: "not seen" } as const;
const CLASSES = { fine: "healthy", wrong: "failed", absent: "", blind: "loading" } as const;

/** What `sie doctor` finds, each with its remedy, when it is asked for: it connects to the broker and to each part. */
export function Doctor() {
  const [report, setReport] = useState<Report>();
  const [trouble, setTrouble] = useState("");
  const [isRunning, setRunning] = useState(false);
  async function run() {
    setRunning(true);
    setTrouble("");
    try {
      setReport(await get<Report>("/v1/doctor", LIMIT_MS));
    } catch (error) {
      if (!(error instanceof SIEError)) throw error;
      setTrouble(error.status === 401 || error.status === 403 ? `${error.message}: the doctor needs a key with the scope admin` : error.message);
    } finally {
      setRunning(false);
    }
  }
  return (
    <>
      <h2>Doctor</h2>
      <button type="button" id="doctor" disabled={isRunning} onClick={run}>{isRunning ? "examining" : "Examine the cluster"}</button>
      {trouble && <p class="bad" role="alert">{trouble}</p>}
      {report && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Findings">
          <table>
            <thead><tr><th>check</th><th>state</th><th>finding and remedy</th></tr></thead>
            <tbody id="findings">
              {report.checks.map((each) => (
                <tr key={each.check}>
                  <td>{each.check}</td>
                  <td><span class={`state ${CLASSES[each.state]}`}>{WORDS[each.state]}</span></td>
                  <td class="wide">
                    {each.says}
                    {each.findings.map((finding) => <p><b>{finding.wrong}</b><br />{`Remedy: ${finding.fix}`}</p>)}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  );
}
