import { useEffect, useState } from "preact/hooks";
import { type Job, type JobManifest, type JobPart, type JobRow, SIEError } from "sie-client";
import { createClient, getJson } from "./api";
import { useAction } from "./action";
import { saveFile } from "./save-file";
import { isFinal } from "./job-status";
import { Table } from "./table";
import { formatBytes } from "./format";

const PAGE_SIZE = 50;
const SAMPLE_SIZE = 20;

/** The output files that a job has written so far, with a download of those that are stored with the job. */
export function JobParts({ job }: { job: Job }) {
  const [manifest, setManifest] = useState<JobManifest>();
  const [after, setAfter] = useState(0);
  const [readError, setReadError] = useState("");
  const [refreshes, setRefreshes] = useState(0);
  const { isBusy, notice, refusal, runAction } = useAction();
  // Each request costs the gateway the records of all parts, so a full page is not read again until the job ends.
  const isFull = manifest?.next != null && !isFinal(job.state);
  const progress = isFull ? "" : `${job.counts.shards_done} ${isFinal(job.state)}`;
  useEffect(() => {
    let ended = false;
    async function read() {
      try {
        const manifest = await getJson<JobManifest>(`/v1/jobs/${encodeURIComponent(job.id)}/manifest?limit=${PAGE_SIZE}&after=${after}`);
        if (ended) return;
        setManifest(manifest);
        setReadError("");
      } catch (error) {
        if (!(error instanceof SIEError)) throw error;
        if (!ended) setReadError(error.message);
      }
    }
    void read();
    return () => {
      ended = true;
    };
  }, [job.id, progress, after, refreshes]);
  const download = (part: JobPart) =>
    runAction(async () => {
      saveFile(await createClient().jobs.part(job.id, part), part.name);
      return `${part.name}: ${formatBytes(part.bytes)} downloaded`;
    });
  if (readError) {
    return (
      <p class="row">
        <span class="bad" role="alert">{readError}</span>
        <button type="button" onClick={() => setRefreshes(refreshes + 1)}>Try again</button>
      </p>
    );
  }
  if (!manifest) return <p class="dim">reading the list of files</p>;
  return (
    <>
      <h3>Output</h3>
      {job.request.output?.url && <p class="dim">{`The files are at ${job.output_url || job.request.output.url}`}</p>}
      {manifest.parts.length === 0 && <p class="dim">No part is written yet.</p>}
      {manifest.parts.length > 0 && (
        <Table label={`Output of ${job.id}`} class="parts" isTall columns={["file", { number: "rows" }, { number: "failed" }, { number: "size" }, "input", "sha256"]}>
          {manifest.parts.map((part) => (
            <tr key={part.name}>
              <td>{job.request.output?.url ? part.name : <button type="button" class="link" disabled={isBusy} aria-label={`Download ${part.name}`} onClick={() => download(part)}>{part.name}</button>}</td>
              <td class="number">{part.rows}</td><td class="number">{part.failed}</td><td class="number">{formatBytes(part.bytes)}</td>
              <td class="name">{part.source}</td><td title={part.sha256}>{part.sha256.slice(0, 12)}</td>
            </tr>
          ))}
        </Table>
      )}
      {(after > 0 || manifest.next != null) && (
        <p class="row">
          <button type="button" disabled={after === 0} onClick={() => setAfter(Math.max(0, after - PAGE_SIZE))}>Parts before</button>
          <button type="button" disabled={manifest.next == null} onClick={() => setAfter(manifest.next ?? 0)}>Further parts</button>
        </p>
      )}
      <p role="status">{isBusy ? "downloading" : notice}</p>
      {refusal && <p class="bad" role="alert">{refusal}</p>}
    </>
  );
}

/** A sample of the rows that have an answer or an error, without their values. */
export function JobRows({ job }: { job: Job }) {
  const [rows, setRows] = useState<JobRow[]>();
  const { isBusy, notice, refusal, runAction } = useAction();
  const show = (failed: boolean) =>
    runAction(async () => {
      const rows = await createClient().jobs.rows(job.id, { limit: SAMPLE_SIZE, failed });
      setRows(rows);
      return rows.length ? `${rows.length} ${failed ? "rows that failed" : "answered rows"}` : `no ${failed ? "row that failed" : "answered row"} is written yet`;
    });
  return (
    <>
      <h3>Rows</h3>
      <p class="row">
        <button type="button" class="sample" disabled={isBusy} onClick={() => show(false)}>Sample of rows</button>
        <button type="button" class="sample-failed" disabled={isBusy} onClick={() => show(true)}>Sample of failed rows</button>
      </p>
      <p role="status">{isBusy ? "reading" : notice}</p>
      {refusal && <p class="bad" role="alert">{refusal}</p>}
      {rows && rows.length > 0 && (
        <Table label={`Rows of ${job.id}`} class="cards" rows={{ class: "rows" }} columns={["row", { number: "tokens" }, "error"]}>
          {rows.map((row) => (
            <tr><td class="name">{row.id}</td><td data-label="tokens" class="number">{row.tokens}</td><td data-label="error" class="wide">{row.error && <span class="bad">{`${row.error.code} ${row.error.message}`}</span>}</td></tr>
          ))}
        </Table>
      )}
    </>
  );
}
