import { Fragment } from "preact";
import { useEffect, useState } from "preact/hooks";
import { type JobPage, type JobState, SIEError } from "sie-client";
import { scopes } from "./api";
import { useAsked } from "./asked";
import { Batches } from "./batches";
import { JobDetail } from "./job-detail";
import { JobForm } from "./job-form";
import { EVERY_MS, Pages, Progress, usePages } from "./job-table";
import { clock, forecastOf, rateOf } from "./job-words";
import type { Model } from "./types";

const PAGE = 20;
const STATES: JobState[] = ["queued", "planning", "running", "paused", "finalizing", "completed", "failed", "cancelled", "expired"];

/** Work on whole files: jobs and batches of this key, all of them for an administrator. */
export function Jobs({ models }: { models: Model[] }) {
  const [mine, setMine] = useState<string[]>();
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    scopes().then(setMine, (error: unknown) => {
      if (!(error instanceof SIEError)) throw error;
      setTrouble(error.message);
    });
  }, []);
  if (trouble) return <p class="bad" role="alert">{trouble}</p>;
  if (!mine) return <p class="dim" role="status">reading what your key may do</p>;
  if (!mine.includes("infer")) return <p class="dim">Your key lacks the scope infer, which jobs and batches need.</p>;
  return (
    <section>
      <JobList models={models} />
      <Batches />
    </section>
  );
}

function JobList({ models }: { models: Model[] }) {
  const pages = usePages();
  const [state, setState] = useState<JobState | "">("");
  const [open, setOpen] = useState("");
  const [look, setLook] = useState(0);
  const [isSubmitting, setSubmitting] = useState(false);
  const query = new URLSearchParams({ limit: `${PAGE}`, ...(state ? { state } : {}), ...(pages.after ? { after: pages.after } : {}) });
  const { value, trouble } = useAsked<JobPage>(`/v1/jobs?${query}`, EVERY_MS, look);

  function filter(next: JobState | "") {
    setState(next);
    pages.setSteps(() => []);
  }
  const again = () => setLook((old) => old + 1);
  function submitted(id: string) {
    filter("");
    setOpen(id);
    again();
  }
  return (
    <>
      <h2>Jobs</h2>
      <p class="row">
        <label>
          State
          <select id="job-state" value={state} onChange={(event) => filter(event.currentTarget.value as JobState | "")}>
            <option value="">all</option>
            {STATES.map((each) => <option value={each}>{each}</option>)}
          </select>
        </label>
        <button type="button" id="new-job" aria-expanded={isSubmitting} onClick={() => setSubmitting(!isSubmitting)}>New job</button>
      </p>
      {isSubmitting && <JobForm models={models} onDone={submitted} />}
      {trouble && <p class="bad" role="alert">{trouble}</p>}
      {value && value.data.length === 0 && <p class="dim">{state ? `No job is ${state}.` : "No job is here."}</p>}
      {value && value.data.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Jobs">
          <table>
            <thead><tr><th scope="col">job</th><th scope="col">state</th><th scope="col">rows</th><th scope="col" class="number">failed</th><th scope="col" class="number">rate</th><th scope="col">forecast</th><th scope="col">model</th><th scope="col">submitted</th></tr></thead>
            <tbody id="jobs">
              {value.data.map((job) => (
                <Fragment key={job.id}>
                  <tr data-job={job.id}>
                    <td class="name"><button type="button" class="link" aria-expanded={open === job.id} onClick={() => setOpen(open === job.id ? "" : job.id)}>{job.name || job.id}</button></td>
                    <td><span class={`state ${job.state}`}>{job.state}</span></td>
                    <td><Progress name={job.name || job.id} done={job.counts.done ?? 0} of={job.counts.rows} /></td>
                    <td class="number">{job.counts.failed}</td>
                    <td class="number">{rateOf(job)}</td>
                    <td class="forecast">{forecastOf(job)}</td>
                    <td class="name">{job.model}</td>
                    <td>{clock(job.created_at)}</td>
                  </tr>
                  {open === job.id && <tr class="opened"><td colSpan={8}><JobDetail job={job} onChange={again} /></td></tr>}
                </Fragment>
              ))}
            </tbody>
          </table>
        </div>
      )}
      <Pages what="jobs" pages={pages} next={value?.next ?? ""} />
    </>
  );
}
