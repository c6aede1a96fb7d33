import { useState } from "preact/hooks";
import { getJson } from "./api";
import { useAction } from "./action";
import { MissingScope, useScope } from "./session";
import { Table } from "./table";
import type { DoctorReport } from "./types";
import { InlineCode } from "./inline-code";

const LACKS_SCOPE = "The key lacks the scope admin.";
const TIMEOUT_MS = 80_000;
const STATE_LABELS = { fine: "fine", wrong: "wrong", absent: "not there", blind: "not seen" } as const;
const STATE_CLASSES = { fine: "healthy", wrong: "failed", absent: "", blind: "loading" } as const;

/** A button that runs the checks of `sie doctor`, and their findings with remedies. */
export function Doctor() {
  const [report, setReport] = useState<DoctorReport>();
  const { isBusy, refusal, runAction } = useAction(useScope("admin") ? "" : LACKS_SCOPE);
  const run = () => runAction(async () => (setReport(await getJson<DoctorReport>("/v1/doctor", TIMEOUT_MS)), ""));
  return (
    <>
      <p class="dim">The doctor connects to the broker and to each part of the cluster, as <code>sie doctor</code> does.</p>
      <button type="button" id="doctor" disabled={isBusy} onClick={run}>{isBusy ? "examining" : "Examine the cluster"}</button>
      {refusal && <div class="bad" role="alert">{refusal === LACKS_SCOPE ? <MissingScope scope="admin" subject="The doctor needs" /> : refusal}</div>}
      {report && (
        <Table label="Findings" class="cards" rows={{ id: "findings" }} columns={["check", "state", "finding and remedy"]}>
          {report.checks.map((check) => (
            <tr key={check.check}>
              <td>{check.check}</td>
              <td data-label="state"><span class={`state ${STATE_CLASSES[check.state]}`}>{STATE_LABELS[check.state]}</span></td>
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
