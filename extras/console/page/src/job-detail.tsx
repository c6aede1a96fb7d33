import { useState } from "preact/hooks";
import type { Job } from "sie-client";
import { createClient, REPEATABLE } from "./api";
import { useAction } from "./action";
import { Confirm } from "./confirm";
import { CodeSamples } from "./code-samples";
import { JobParts, JobRows } from "./job-parts";
import { jobPrograms } from "./job-requests";
import { Progress } from "./job-table";
import { forecastOf, isFinal, nameOf, rateOf } from "./job-status";
import { navigate, href } from "./routes";
import { formatDuration, formatTime } from "./format";

type Confirmed = "cancel" | "delete"; // actions that a question confirms
const QUESTIONS: Record<Confirmed, string> = {
  cancel: "End this job for ever? What it has written stays.",
  delete: "Delete this job, with the output that is stored with it, for ever?",
};

/** The state, figures, output and rows of a job, with its actions. `onChange` is called after each action. */
export function JobDetail({ job, onChange }: { job: Job; onChange: () => void }) {
  const { counts, error, trouble, broken = [], errors = {} } = job;
  const facts: [string, string][] = [
    ["rows", `${counts.done} of ${counts.rows ?? "an unknown number"}`],
    ["failed", `${counts.failed}`],
    ["reused", `${counts.reused}`],
    ["tokens", `${counts.tokens}`],
    ["parts", `${counts.shards_done} of ${counts.shards ?? "?"}${counts.shards_failed ? `, ${counts.shards_failed} failed` : ""}`],
    ["rate", rateOf(job)],
    ["forecast", forecastOf(job)],
    ["workers", job.forecast ? `${job.forecast.workers}` : ""],
    ["deadline", job.request.deadline ? formatTime(job.request.deadline) : ""],
    ["operation", job.operation],
    ["owner", job.owner ?? ""],
    ["submitted", formatTime(job.created_at)],
    ["started", job.started_at ? formatTime(job.started_at) : ""],
    ["ended", job.ended_at ? `${formatTime(job.ended_at)}${job.started_at ? `, after ${formatDuration(job.ended_at - job.started_at)}` : ""}` : ""],
    ["fingerprint", job.fingerprint ?? ""],
  ];
  const isWriting = !isFinal(job.state) && Boolean(counts.rows) && counts.done === counts.rows;
  return (
    <article class="detail job">
      <h2>{nameOf(job)}</h2>
      <p class="dim">{job.id}</p>
      <p class="row head"><span class={`state ${job.state}`}>{job.state}</span><Progress name={nameOf(job)} done={counts.done ?? 0} of={counts.rows} isOver={isFinal(job.state)} />{isWriting && <span class="dim">writing the output</span>}<a href={href("models", [job.model])}>{job.model}</a></p>
      <JobActions job={job} onChange={onChange} />
      {error && <p class="bad" role="alert">{`${error.code} ${error.message}${error.param ? ` (${error.param})` : ""}`}</p>}
      {trouble && <p class="warn">{`The job waits and tries again: ${trouble.code} ${trouble.message}`}</p>}
      <dl class="facts">
        {facts.filter(([, value]) => value).map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}
      </dl>
      {Object.keys(errors).length > 0 && (
        <>
          <h3>Rows with an error, by code</h3>
          <dl class="facts errors">{Object.entries(errors).map(([code, count]) => <div><dt>{code}</dt><dd>{count}</dd></div>)}</dl>
        </>
      )}
      {broken.length > 0 && (
        <>
          <h3>Parts of the input that could not be read</h3>
          <ul class="broken">{broken.map((part) => <li>{part}</li>)}</ul>
        </>
      )}
      <JobParts job={job} />
      <JobRows job={job} />
      <details><summary>Request</summary><pre class="code request">{JSON.stringify(job.request, null, 2)}</pre></details>
      <CodeSamples programs={jobPrograms({ request: job.request, file: "" })} title="Submit the same job again with" />
    </article>
  );
}

function JobActions({ job, onChange }: { job: Job; onChange: () => void }) {
  const [confirming, setConfirming] = useState<Confirmed>();
  const { isBusy, notice, refusal, runAction } = useAction();
  const act = (work: () => Promise<string>) => {
    setConfirming(undefined);
    return runAction(async () => {
      const result = await work();
      onChange();
      return result;
    });
  };
  const { jobs } = createClient();
  const pause = () => act(async () => (await jobs.pause(job.id), "The job pauses once the parts that run are written."));
  const resume = () => act(async () => (await jobs.resume(job.id), "The job goes on."));
  const retry = () => runAction(async () => (navigate(href("jobs", [(await jobs.retry(job.id, REPEATABLE)).id])), ""));
  const confirmed: Record<Confirmed, () => Promise<boolean>> = {
    cancel: () => act(async () => (await jobs.cancel(job.id), "The job ends.")),
    delete: () => runAction(async () => (await jobs.delete(job.id), navigate(href("jobs")), "")),
  };
  const isEnded = isFinal(job.state);
  return (
    <>
      <p class="row actions">
        {!isEnded && job.state !== "paused" && <button type="button" class="pause" disabled={isBusy} onClick={pause}>Pause</button>}
        {job.state === "paused" && <button type="button" class="resume" disabled={isBusy} onClick={resume}>Resume</button>}
        {!isEnded && <button type="button" class="cancel" disabled={isBusy} onClick={() => setConfirming("cancel")}>Cancel</button>}
        {isEnded && Boolean(job.counts.failed) && <button type="button" class="retry" disabled={isBusy} onClick={retry}>Retry failed rows</button>}
        {isEnded && <button type="button" class="delete" disabled={isBusy} onClick={() => setConfirming("delete")}>Delete</button>}
      </p>
      {confirming && (
        <Confirm key={confirming} name={`Confirm: ${confirming} ${job.id}`} question={QUESTIONS[confirming]} yes={confirming === "cancel" ? "End it" : "Delete it"} onYes={() => void confirmed[confirming]()} onNo={() => setConfirming(undefined)} />
      )}
      <p role="status">{isBusy ? "working" : notice}</p>
      {refusal && <p class="bad" role="alert">{refusal}</p>}
    </>
  );
}
