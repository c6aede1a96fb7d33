import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { type JobRequest, SIEError } from "sie-client";
import { client } from "./api";
import { useAttempts } from "./attempts";
import { Copies } from "./copies";
import { jobPrograms } from "./job-requests";
import { complaint, parsed } from "./json-map";
import type { Model } from "./types";

type Operation = NonNullable<JobRequest["operation"]>;
type InputFormat = NonNullable<JobRequest["input"]["format"]>;
type OutputFormat = NonNullable<NonNullable<JobRequest["output"]>["format"]>;

const OPERATIONS: Operation[] = ["encode", "score", "extract"];
const INPUTS: InputFormat[] = ["jsonl", "csv", "parquet", "images"];
const OUTPUTS: OutputFormat[] = ["parquet", "jsonl", "npy"];
const FILE_LIFE_S = 30 * 86_400; // the longest that the server takes; no job lasts as long
const EMPTY = {
  url: "", model: "", operation: "encode" as Operation, text: "{text}", query: "{query}", document: "{document}", image: "",
  id: "", keep: "", input: "" as InputFormat | "", output: "parquet" as OutputFormat, place: "", params: "", name: "", deadline: "", cache: false,
  expires: false, windows: "", zone: Intl.DateTimeFormat().resolvedOptions().timeZone, tokens: "", rows: "", pool: "", sink: "", collection: "",
};
type Given = typeof EMPTY;
type Written = { [Name in keyof Given]: string extends Given[Name] ? Name : never }[keyof Given]; // what is any text

const listed = (text: string): string[] => text.split(",").map((each) => each.trim()).filter(Boolean);

/** The request of what was filled in; fields that are empty are left to the gateway. */
function requestOf(given: Given): JobRequest {
  const { operation, image } = given;
  // as `sie jobs submit` reads a template, so that the same words are the same job
  const [text, query, document] = [given.text, given.query, given.document].map((each) => each.replaceAll("\\n", "\n")) as [string, string, string];
  const templates = image.trim() ? { image: image.trim() } : operation === "score" ? { query, document } : { text };
  const [keep, windows] = [listed(given.keep), listed(given.windows)];
  const [sink, collection] = [given.sink.trim(), given.collection.trim()];
  const params = parsed(given.params);
  return {
    model: given.model,
    operation,
    input: {
      ...(given.url.trim() ? { url: given.url.trim() } : {}),
      ...templates,
      ...(given.id.trim() ? { id: given.id.trim() } : {}),
      ...(keep.length ? { keep } : {}),
      ...(given.input ? { format: given.input } : {}),
    },
    output: {
      format: given.output,
      ...(given.place.trim() ? { url: given.place.trim() } : {}),
      ...(sink ? { sink } : {}),
      ...(collection ? { collection } : {}),
    },
    ...(params ? { params } : {}),
    ...(given.name.trim() ? { name: given.name.trim() } : {}),
    ...(given.deadline ? { deadline: new Date(given.deadline).getTime() / 1000 } : {}),
    ...(given.deadline && given.expires ? { expires: true } : {}),
    ...(windows.length ? { windows, time_zone: given.zone.trim() } : {}),
    ...(given.tokens ? { tokens_per_s: Number(given.tokens) } : {}),
    ...(given.rows ? { shard_rows: Number(given.rows) } : {}),
    ...(given.pool.trim() ? { pool: given.pool.trim() } : {}),
    ...(given.cache ? { cache: true } : {}),
  };
}

/** Sends the file first. A file of a job that is refused is deleted, as nothing reads it. */
async function submitted(request: JobRequest, file: File | undefined): Promise<string> {
  const { files, jobs } = client();
  if (!file) return (await jobs.submit(request)).id;
  const sent = await files.upload(file, file.name, "jobs", { expiresAfterS: FILE_LIFE_S });
  try {
    return (await jobs.submit({ ...request, input: { ...request.input, file: sent.id } })).id;
  } catch (error) {
    if (error instanceof SIEError && error.status >= 400 && error.status < 500) await files.delete(sent.id);
    throw error;
  }
}

/** `onDone`: called with the id of a job that was submitted. */
export function JobForm({ models, onDone }: { models: Model[]; onDone: (id: string) => void }) {
  const [given, setGiven] = useState<Given>(EMPTY);
  const [file, setFile] = useState<File>();
  const picker = useRef<HTMLInputElement>(null);
  const { isBusy, said, refusal, attempt } = useAttempts();
  const fitting = useMemo(() => models.filter((model) => model.tasks.includes(given.operation)), [models, given.operation]);
  useEffect(() => {
    setGiven((old) => (fitting.some((model) => model.id === old.model) ? old : { ...old, model: fitting.find((model) => model.loaded)?.id ?? fitting[0]?.id ?? "" }));
  }, [fitting]);
  const wrong = complaint(given.params);
  const isReady = !isBusy && !wrong && Boolean(given.model) && Boolean(file) !== Boolean(given.url.trim());
  const request = useMemo(() => (wrong ? undefined : requestOf(given)), [given, wrong]);

  async function submit(event: Event) {
    event.preventDefault();
    if (!request) return;
    const isDone = await attempt(async () => {
      const id = await submitted(request, file);
      onDone(id);
      return `Submitted as ${id}.`;
    });
    if (!isDone) return;
    setFile(undefined);
    if (picker.current) picker.current.value = "";
  }
  const set = <N extends keyof Given>(name: N, value: Given[N]) => setGiven((old) => ({ ...old, [name]: value }));
  const field = (name: Written, title: string, placeholder = "", isNumber = false) => (
    <label>
      {title}
      <input id={`job-${name}`} inputmode={isNumber ? "numeric" : "text"} pattern={isNumber ? "[0-9]*" : undefined} value={given[name]} placeholder={placeholder} spellcheck={false} autocomplete="off" onInput={(event) => set(name, event.currentTarget.value)} />
    </label>
  );
  const check = (name: "cache" | "expires", title: string) => (
    <label class="chip">
      <input id={`job-${name}`} type="checkbox" checked={given[name]} onChange={(event) => set(name, event.currentTarget.checked)} />
      {title}
    </label>
  );
  const template = (name: "text" | "query" | "document", title: string) => (
    <label class="wide">
      {title}
      <textarea id={`job-${name}`} rows={2} spellcheck={false} value={given[name]} onInput={(event) => set(name, event.currentTarget.value)} />
    </label>
  );
  const choice = <N extends "operation" | "input" | "output">(name: N, title: string, options: readonly Given[N][], names: Partial<Record<string, string>> = {}) => (
    <label>
      {title}
      <select id={`job-${name}`} value={given[name]} onChange={(event) => set(name, event.currentTarget.value as Given[N])}>
        {options.map((each) => <option value={each}>{names[each] ?? each}</option>)}
      </select>
    </label>
  );
  const isImage = Boolean(given.image.trim());
  return (
    <form class="panel fields" id="job-form" aria-label="New job" onSubmit={submit}>
      <label>
        File of rows
        <input id="job-file" ref={picker} type="file" accept=".jsonl,.csv,.parquet" onChange={(event) => setFile(event.currentTarget.files?.[0])} />
      </label>
      {field("url", "or an address that the server allows", "s3://bucket/rows/")}
      {choice("input", "Format of the input", ["", ...INPUTS], { "": "by its name" })}
      {choice("operation", "Operation", OPERATIONS)}
      <label>
        Model
        <select id="job-model" value={given.model} onChange={(event) => set("model", event.currentTarget.value)}>
          {fitting.map((model) => <option value={model.id}>{model.id}</option>)}
        </select>
      </label>
      {!isImage && given.operation !== "score" && template("text", "Template of the text: columns in braces, \\n is a line break")}
      {!isImage && given.operation === "score" && <>{template("query", "Template of the query: columns in braces")}{template("document", "Template of the document")}</>}
      {given.operation !== "score" && field("image", "Column of images, in place of the text")}
      {field("id", "Column of ids", "by default the number of the row")}
      {field("keep", "Columns that the output repeats", "title, url")}
      {choice("output", "Format of the output", OUTPUTS)}
      {field("place", "Address of the output", "kept with the job")}
      <label>
        Parameters, as JSON
        <input id="job-params" value={given.params} placeholder={given.operation === "extract" ? '{"labels": ["person"]}' : '{"dimensions": 256}'} spellcheck={false} autocomplete="off" aria-invalid={Boolean(wrong)} onInput={(event) => set("params", event.currentTarget.value)} />
        {wrong && <span class="bad" role="alert">{wrong}</span>}
      </label>
      {field("name", "Name")}
      <label>
        Deadline
        <input id="job-deadline" type="datetime-local" value={given.deadline} onInput={(event) => set("deadline", event.currentTarget.value)} />
      </label>
      {check("cache", "Take answers of earlier jobs")}
      <details class="wide" id="job-more">
        <summary>When and how fast it works, database</summary>
        <div class="fields">
          {field("windows", "Times of the day at which it works", "22:00-06:00")}
          {field("zone", "Their time zone", "UTC")}
          {field("tokens", "At most tokens per second", "no limit", true)}
          {given.deadline && check("expires", "Rows that are late do not run")}
          {field("rows", "Rows of a part of the output", "10000", true)}
          {field("pool", "Pool of workers", "the default")}
          {field("sink", "Database that gets the vectors", "a name of SIE_JOBS_SINKS")}
          {given.sink.trim() && field("collection", "Its collection or table")}
        </div>
      </details>
      <div class="wide">
        <button type="submit" id="job-submit" disabled={!isReady}>Submit</button>
        <p role="status">{isBusy ? (file ? `sending ${file.name}` : "submitting") : said}</p>
        {refusal && <p class="bad" role="alert">{refusal}</p>}
        {file && given.url.trim() && <p class="bad" role="alert">A job reads a file or an address, not both.</p>}
        {request && (file || given.url.trim()) && <Copies programs={jobPrograms({ request, file: file?.name ?? "" })} title="The same as" />}
      </div>
    </form>
  );
}
