import { useState } from "preact/hooks";
import type { Batch, BatchPage as Page } from "sie-client";
import { sendRequest, createClient } from "./api";
import { usePolling } from "./polling";
import { useAction } from "./action";
import { Confirm } from "./confirm";
import { saveFile } from "./save-file";
import { formatTime } from "./format";
import { isFinal } from "./job-status";
import { EVERY_MS, Pages, Progress, usePages } from "./job-table";
import { href } from "./routes";
import { Table } from "./table";

const PAGE_SIZE = 10;
const TIMES = ["created", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled", "expires"] as const;

/** The batches of OpenAI's API: each line of a file is a request. */
export function Batches() {
  const pages = usePages();
  const query = new URLSearchParams({ limit: `${PAGE_SIZE}`, ...(pages.after ? { after: pages.after } : {}) });
  const { value, error } = usePolling<Page>(`/v1/batches?${query}`, EVERY_MS);
  return (
    <>
      <h2>Batches</h2>
      {error && <p class="bad" role="alert">{error}</p>}
      {value && value.data.length === 0 && <p class="dim">There is no batch yet. A client of OpenAI submits one, by POST /v1/batches.</p>}
      {value && value.data.length > 0 && (
        <Table label="Batches" class="cards" rows={{ id: "batches" }} columns={["batch", "state", "requests", { number: "failed" }, "endpoint", "window", "submitted"]}>
          {value.data.map((batch) => (
              <tr key={batch.id}>
                <td class="name"><a href={href("jobs", ["batch", batch.id])}>{batch.id}</a></td>
                <td data-label="state"><span class={`state ${batch.status}`}>{batch.status}</span></td>
                <td data-label="requests"><Progress name={batch.id} done={batch.request_counts.completed + batch.request_counts.failed} of={batch.request_counts.total || null} /></td>
                <td data-label="failed" class="number">{batch.request_counts.failed}</td>
                <td data-label="endpoint">{batch.endpoint}</td>
                <td data-label="window">{batch.completion_window}</td>
                <td data-label="submitted">{formatTime(batch.created_at)}</td>
              </tr>
          ))}
        </Table>
      )}
      <Pages noun="batches" pages={pages} next={value?.has_more ? (value.last_id ?? "") : ""} />
    </>
  );
}

/** The page of one batch. */
export function BatchPage({ id }: { id: string }) {
  const [refreshes, setRefreshes] = useState(0);
  const { value, error } = usePolling<Batch>(`/v1/batches/${encodeURIComponent(id)}`, EVERY_MS, refreshes);
  return (
    <>
      {error && <p class="bad" role="alert">{error}</p>}
      {value ? <BatchDetail batch={value} onChange={() => setRefreshes((count) => count + 1)} /> : !error && <p class="dim" role="status">reading the batch</p>}
    </>
  );
}

function BatchDetail({ batch, onChange }: { batch: Batch; onChange: () => void }) {
  const [isConfirming, setConfirming] = useState(false);
  const { isBusy, notice, refusal, runAction } = useAction();
  const files: [string, string | null | undefined][] = [["input", batch.input_file_id], ["output", batch.output_file_id], ["errors", batch.error_file_id]];
  const download = (id: string) =>
    runAction(async () => {
      const { filename } = await createClient().files.get(id);
      saveFile(await createClient().files.content(id), filename);
      return `${filename} is downloaded`;
    });
  const cancel = () => {
    setConfirming(false);
    return runAction(async () => {
      await sendRequest<Batch>({ method: "POST", path: `/v1/batches/${encodeURIComponent(batch.id)}/cancel` });
      onChange();
      return "The batch ends.";
    });
  };
  const canCancel = !isFinal(batch.status) && batch.status !== "cancelling";
  return (
    <article class="detail batch">
      <h2>{batch.id}</h2>
      <p><span class={`state ${batch.status}`}>{batch.status}</span></p>
      {canCancel && <p><button type="button" class="cancel" disabled={isBusy} onClick={() => setConfirming(true)}>Cancel</button></p>}
      {isConfirming && (
        <Confirm name={`Confirm: cancel ${batch.id}`} question="End this batch for ever? Its answers so far stay." yes="End it" onYes={() => void cancel()} onNo={() => setConfirming(false)} />
      )}
      <p role="status">{isBusy ? "working" : notice}</p>
      {refusal && <p class="bad" role="alert">{refusal}</p>}
      {batch.errors?.data.map((error) => <p class="bad">{`${error.code} ${error.message}`}</p>)}
      <dl class="facts">
        <div><dt>completed</dt><dd>{`${batch.request_counts.completed} of ${batch.request_counts.total}`}</dd></div>
        <div><dt>failed</dt><dd>{batch.request_counts.failed}</dd></div>
        {TIMES.map((name) => {
          const at = batch[`${name}_at`];
          return at && <div><dt>{name.replace("_", " ")}</dt><dd>{formatTime(at)}</dd></div>;
        })}
        {files.map(([name, id]) => id && (
          <div><dt>{`file: ${name}`}</dt><dd><button type="button" class="link" disabled={isBusy} aria-label={`Download ${name} ${id}`} onClick={() => download(id)}>{id}</button></dd></div>
        ))}
      </dl>
      <details><summary>As JSON</summary><pre class="code request">{JSON.stringify(batch, null, 2)}</pre></details>
    </article>
  );
}
