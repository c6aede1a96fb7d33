import { useEffect, useState } from "preact/hooks";
import { sendRequest, getJson } from "./api";
import { useAction } from "./action";
import { Confirm } from "./confirm";
import { formatValue } from "./format";
import { MissingScope, useScope } from "./session";
import { Table } from "./table";
import type { ModelDocument, ModelHistory as History, WrittenConfig } from "./types";

type Revision = History["revisions"][number];

/** Return a change as one line: the operation, the field, its old and its new value. */
function changeText(change: Revision["changes"][number]): string {
  const { op, path, ...rest } = change;
  const values = Object.entries(rest).map(([name, value]) => `${name} ${formatValue(value)}`);
  return [op, path, ...values].filter(Boolean).join("  ");
}

const AUTHORS = new Map([["packaged", "the packaged catalogue"], ["overlay", "a file of the models folder"]]);
const OPERATIONS: Record<string, string> = { seed: "read at the start", create: "added", put: "replaced", patch: "changed", delete: "removed", rollback: "rolled back", restore: "put back: the change did not load" };

/** Return the path by which the gateway passes changes of a model on to the config service. */
const configPath = (model: string): string => `/console/configs/${model.split("/").map(encodeURIComponent).join("/")}`;

/** The revisions of a model with their authors and changes, a rollback, and the entry to read and to change. */
export function ModelHistory({ model }: { model: string }) {
  const [revisions, setRevisions] = useState<Revision[]>();
  const { isBusy, notice, refusal, runAction } = useAction();
  const [confirming, setConfirming] = useState(0); // the revision whose rollback needs a confirmation
  const [document, setDocument] = useState<string>();
  const path = configPath(model);
  const mayChange = useScope("config");

  const reload = async () => setRevisions((await getJson<History>(`${path}/history`)).revisions);
  const show = () =>
    runAction(async () => {
      setDocument(JSON.stringify(await getJson<ModelDocument>(path.replace("/console/configs", "/v1/configs/models")), null, 2));
      return "";
    });
  const rollback = (revision: number) => {
    setConfirming(0);
    return runAction(async () => {
      const reply = await sendRequest<WrittenConfig>({ method: "POST", path: `${path}/rollback`, body: { revision } });
      return `Revision ${revision} is the newest again, as revision ${reply.revision}.`;
    }, reload);
  };
  const write = () =>
    runAction(async () => {
      const entry: unknown = JSON.parse(document ?? "");
      const reply = await sendRequest<WrittenConfig>({ method: "PUT", path, body: entry });
      return [`Written as revision ${reply.revision}.`, ...reply.warnings].join(" ");
    }, reload);
  useEffect(() => {
    void runAction(async () => "", reload);
  }, [model]);

  return (
    <div class="history">
      <h3>History</h3>
      {revisions && (
        <Table label={`History of ${model}`} class="cards" rows={{ class: "revisions" }} columns={[{ number: "revision" }, "when", "author", "operation", "what changed", <span class="unseen">rollback</span>]}>
          {revisions.map((entry, index) => (
            <tr key={entry.revision}>
              <td data-label="revision" class="number">{entry.revision}</td>
              <td data-label="when">{new Date(entry.created_at).toLocaleString()}</td>
              <td data-label="author">{AUTHORS.get(entry.author) ?? entry.author}</td>
              <td data-label="operation">{OPERATIONS[entry.operation] ?? entry.operation}</td>
              <td data-label="what changed" class="wide">{entry.note}{entry.changes.map((change) => <code>{changeText(change)}</code>)}</td>
              <td>
                {index > 0 && mayChange && <button type="button" class="rollback" disabled={isBusy} onClick={() => setConfirming(entry.revision)}>Roll back</button>}
                {confirming === entry.revision && (
                  <Confirm name={`Confirm: revision ${entry.revision}`} question={`Make revision ${entry.revision} the newest?`} yes="Roll back" onYes={() => void rollback(entry.revision)} onNo={() => setConfirming(0)} />
                )}
              </td>
            </tr>
          ))}
        </Table>
      )}
      <MissingScope scope="config" subject="To change this model, or to go back to an earlier revision, you need" />
      <p role="status">{notice}</p>
      {refusal && <p class="bad" role="alert">{refusal}</p>}
      {document === undefined ? (
        <button type="button" class="show-entry" onClick={show}>Show the entry</button>
      ) : (
        <>
          <label>
            {`Entry of ${model}, as JSON`}
            <textarea class="entry" rows={16} spellcheck={false} value={document} onInput={(event) => setDocument(event.currentTarget.value)} />
          </label>
          <button type="button" class="write" disabled={isBusy || !mayChange} onClick={write}>Write the entry</button>
        </>
      )}
    </div>
  );
}
