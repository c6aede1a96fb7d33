import { useState } from "preact/hooks";
import { getJson } from "./api";
import { useAction } from "./action";
import { Table } from "./table";
import type { DoctorReport } from "./types";
import { InlineCode } from "./inline-code";

const LIMIT_MS = 60_000;
const WORDS = { fine: "fine", wrong: "wrong", absent: "not there", blind: "not seen" } as const;
const CLASSES = { fine: "healthy", wrong: "failed", absent: "", blind: "loading" } as const;

/** What `sie doctor` finds, each with its remedy, when it is asked for: it connects to the broker and to each part. */
export function Doctor() {
  const [report, setReport] = useState<DoctorReport>();
  const { isBusy, refusal, runAction } = useAction("The doctor needs a key with the scope admin: sign in above.");
  const run = () => runAction(async () => (setReport(await getJson<DoctorReport>("/v1/doctor", LIMIT_MS)), ""));
  return (
    <>
      <p class="dim">It connects to the broker and to each part, as <code>sie doctor</code> does.</p>
      <button type="button" id="doctor" disabled={isBusy} onClick={run}>{isBusy ? "examining" : "Examine the cluster"}</button>
      {refusal && <p class="bad" role="alert">{refusal}</p>}
      {report && (
        <Table label="Findings" class="cards" rows={{ id: "findings" }} columns={["check", "state", "finding and remedy"]}>
          {report.checks.map((check) => (
            <tr key={check.check}>
              <td>{check.check}</td>
              <td data-label="state"><span class={`state ${CLASSES[check.state]}`}>{WORDS[check.state]}</span></td>
              <td class="wide">
                {check.says}
                {check.findings.map((finding) => <p><b><InlineCode text={finding.wrong} /></b><br />Remedy: <InlineCode text={finding.fix} /></p>)}
              </td>
            </tr>
          ))}
        </Table>
      )}
    </>
  );
}
