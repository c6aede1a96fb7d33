import { useState } from "preact/hooks";
import type { Job, JobPage as Page, JobState } from "sie-client";
import { usePolling } from "./polling";
import { BatchPage, Batches } from "./batches";
import { JobDetail } from "./job-detail";
import { JobForm } from "./job-form";
import { EVERY_MS, Pages, Progress, usePages } from "./job-table";
import { formatTime } from "./format";
import { forecastOf, isFinal, nameOf, problemOf, rateOf } from "./job-status";
import { navigate, href } from "./routes";
import { MissingScope, useScope } from "./session";
import { Table } from "./table";
import type { Model } from "./types";

const PAGE_SIZE = 10;
const STATES: JobState[] = ["queued", "planning", "running", "paused", "finalizing", "completed", "failed", "cancelled", "expired"];

interface Props {
  models: Model[];
  parts: string[];
  onFind: (text: string) => void;
}

/** The jobs and batches of this key, or all of them for an administrator. `parts` of the address: `new`, the id of a job,
 * or `batch` and the id of a batch. */
export function Jobs({ models, parts: [first = "", second = ""], onFind }: Props) {
  if (!useScope("infer")) return <MissingScope scope="infer" subject="Jobs and batches need" />;
  if (!first) return <section><JobList /><Batches /></section>;
  return (
    <section>
      <p class="path"><a href={href("jobs")}>Jobs</a></p>
      {first === "new" ? <><h2>New job</h2><JobForm models={models} onDone={(id) => navigate(href("jobs", [id]))} onFind={onFind} /></>
        : first === "batch" ? <BatchPage key={second} id={second} /> : <JobPage key={first} id={first} />}
    </section>
  );
}

/** The page of one job. */
function JobPage({ id }: { id: string }) {
  const [refreshes, setRefreshes] = useState(0);
  const { value, error } = usePolling<Job>(`/v1/jobs/${encodeURIComponent(id)}`, EVERY_MS, refreshes);
  return (
    <>
      {error && <p class="bad" role="alert">{error.startsWith("NOT_FOUND") ? `There is no job ${id}: it was deleted, or another key owns it.` : error}</p>}
      {value ? <JobDetail job={value} onChange={() => setRefreshes((count) => count + 1)} /> : !error && <p class="dim" role="status">reading the job</p>}
    </>
  );
}

function JobList() {
  const pages = usePages();
  const [state, setState] = useState<JobState | "">("");
  const query = new URLSearchParams({ limit: `${PAGE_SIZE}`, ...(state ? { state } : {}), ...(pages.after ? { after: pages.after } : {}) });
  const { value, error } = usePolling<Page>(`/v1/jobs?${query}`, EVERY_MS);

  function filter(next: JobState | "") {
    setState(next);
    pages.setSteps(() => []);
  }
  return (
    <>
      <div class="row title">
        <h2>Jobs</h2>
        <a class="button" id="new-job" href={href("jobs", ["new"])}>New job</a>
        <label class="row">
          State
          <select id="job-state" value={state} onChange={(event) => filter(event.currentTarget.value as JobState | "")}>
            <option value="">all</option>
            {STATES.map((state) => <option value={state}>{state}</option>)}
          </select>
        </label>
      </div>
      {error && <p class="bad" role="alert">{error}</p>}
      {value && value.data.length === 0 && (
        <p class="dim">{state ? `No job is ${state}.` : "There is no job yet. A job encodes, scores or extracts a whole file: CSV, JSON Lines or Parquet. New job submits one."}</p>
      )}
      {value && value.data.length > 0 && (
        <Table label="Jobs" class="cards" rows={{ id: "jobs" }} columns={["job", "state", "rows", { number: "failed" }, { number: "rate" }, "forecast", "model", "submitted"]}>
          {value.data.map((job) => {
            const { text, isFailure } = problemOf(job);
            return (
              <tr key={job.id} data-job={job.id}>
                <td class="name"><a href={href("jobs", [job.id])} title={job.id}>{nameOf(job)}</a></td>
                <td data-label="state" class="wrap"><span class={`state ${job.state}`}>{job.state}</span>{text && <p class={`about ${isFailure ? "bad" : "warn"}`}>{text}</p>}</td>
                <td data-label="rows"><Progress name={nameOf(job)} done={job.counts.done ?? 0} of={job.counts.rows} isOver={isFinal(job.state)} /></td>
                <td data-label="failed" class="number">{job.counts.failed}</td>
                <td data-label="rate" class="number">{rateOf(job)}</td>
                <td data-label="forecast" class="forecast">{forecastOf(job)}</td>
                <td data-label="model" class="name">{job.model}</td>
                <td data-label="submitted">{formatTime(job.created_at)}</td>
              </tr>
            );
          })}
        </Table>
      )}
      <Pages noun="jobs" pages={pages} next={value?.next ?? ""} />
    </>
  );
}
