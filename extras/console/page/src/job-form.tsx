import { useEffect, useMemo, useState } from "preact/hooks";
import { type JobRequest, SIEError } from "sie-client";
import { createClient, REPEATABLE } from "./api";
import { useAction } from "./action";
import { CodeSamples } from "./code-samples";
import { jobPrograms } from "./job-requests";
import { sortRank } from "./model-properties";
import { Picker } from "./picker";
import { JsonParameters, faultsOf, Controls, outputsOf, paramsOf, type Settings, UNSET } from "./playground-controls";
import { shorten } from "./playground-shared";
import { type Preview, preview } from "./rows-preview";
import { Table } from "./table";
import type { Model } from "./types";

type Operation = NonNullable<JobRequest["operation"]>;
type InputFormat = NonNullable<JobRequest["input"]["format"]>;
type Boundary = (typeof BOUNDARIES)[number];
type OutputFormat = NonNullable<NonNullable<JobRequest["output"]>["format"]>;

const OPERATIONS: Operation[] = ["encode", "score", "extract"];
const BOUNDARIES = ["sentence", "paragraph", "token"] as const; // a chunk ends at one of these
const INPUTS: InputFormat[] = ["jsonl", "csv", "parquet", "images"];
const OUTPUTS: OutputFormat[] = ["parquet", "jsonl", "npy"];
const FILE_LIFE_S = 30 * 86_400; // the longest life that the server allows
const EMPTY = {
  url: "", model: "", operation: "encode" as Operation, text: "{text}", query: "{query}", document: "{document}", image: "",
  chunk: "", overlap: "", least: "", boundary: "sentence" as Boundary, alone: false, documents: "", parser: "",
  id: "", keep: "", input: "" as InputFormat | "", format: "parquet" as OutputFormat, place: "", name: "", deadline: "", cache: false,
  expires: false, windows: "", zone: Intl.DateTimeFormat().resolvedOptions().timeZone, tokens: "", rows: "", pool: "", sink: "", collection: "",
};
type JobFields = typeof EMPTY;
type TextField = { [Name in keyof JobFields]: string extends JobFields[Name] ? Name : never }[keyof JobFields]; // fields that hold any text

/** Split a list at its commas. */
const splitList = (text: string): string[] => text.split(",").map((name) => name.trim()).filter(Boolean);

/** Return true if each text is encoded in chunks. */
const isChunked = ({ operation, image, chunk }: JobFields): boolean => operation === "encode" && !image.trim() && Boolean(chunk);

/** Return the rule by which texts are cut into chunks. */
function chunksOf({ chunk, overlap, least, boundary }: JobFields) {
  return {
    max_tokens: Number(chunk),
    ...(overlap ? { overlap_tokens: Number(overlap) } : {}),
    ...(boundary === EMPTY.boundary ? {} : { boundary }),
    ...(least ? { min_tokens: Number(least) } : {}),
  };
}

/** Return the request of the form without the empty fields, for which the gateway has defaults. */
function requestOf(fields: JobFields, settings: Settings, model: Model | undefined): JobRequest {
  const { operation, image } = fields;
  // `sie jobs submit` also replaces `\n`, so that equal templates make equal jobs.
  const [text, query, document] = [fields.text, fields.query, fields.document].map((template) => template.replaceAll("\\n", "\n")) as [string, string, string];
  const [documents, parser] = [fields.documents.trim(), fields.parser.trim()];
  const chunks = isChunked(fields) ? { chunks: chunksOf(fields), ...(fields.alone ? { context: false } : {}) } : {};
  const source = "chunks" in chunks && documents ? { documents, ...(parser ? { parser } : {}) } : { text };
  const templates = image.trim() ? { image: image.trim() } : operation === "score" ? { query, document } : { ...source, ...chunks };
  const [keep, windows] = [splitList(fields.keep), splitList(fields.windows)];
  const [sink, collection] = [fields.sink.trim(), fields.collection.trim()];
  const params = model ? paramsOf(operation, settings, model) : {};
  if (String(params["output_types"]) === outputsOf(model)[0]) delete params["output_types"]; // the default output of the model
  return {
    model: fields.model,
    operation,
    input: {
      ...(fields.url.trim() ? { url: fields.url.trim() } : {}),
      ...templates,
      ...(fields.id.trim() ? { id: fields.id.trim() } : {}),
      ...(keep.length ? { keep } : {}),
      ...(fields.input ? { format: fields.input } : {}),
    },
    output: {
      format: fields.format,
      ...(fields.place.trim() ? { url: fields.place.trim() } : {}),
      ...(sink ? { sink } : {}),
      ...(collection ? { collection } : {}),
    },
    ...(Object.keys(params).length ? { params } : {}),
    ...(fields.name.trim() ? { name: fields.name.trim() } : {}),
    ...(fields.deadline ? { deadline: new Date(fields.deadline).getTime() / 1000 } : {}),
    ...(fields.deadline && fields.expires ? { expires: true } : {}),
    ...(windows.length ? { windows, time_zone: fields.zone.trim() } : {}),
    ...(fields.tokens ? { tokens_per_s: Number(fields.tokens) } : {}),
    ...(fields.rows ? { shard_rows: Number(fields.rows) } : {}),
    ...(fields.pool.trim() ? { pool: fields.pool.trim() } : {}),
    ...(fields.cache ? { cache: true } : {}),
  };
}

/** Upload the file, if any, and submit the job. Return its id. If the server refuses the job, the file is deleted. */
async function submitJob(request: JobRequest, file: File | undefined): Promise<string> {
  const { files, jobs } = createClient();
  if (!file) return (await jobs.submit(request, REPEATABLE)).id;
  const upload = await files.upload(file, file.name, "jobs", { expiresAfterS: FILE_LIFE_S });
  try {
    return (await jobs.submit({ ...request, input: { ...request.input, file: upload.id } }, REPEATABLE)).id;
  } catch (error) {
    if (error instanceof SIEError && error.status >= 400 && error.status < 500) await files.delete(upload.id);
    throw error;
  }
}

const TEXT_COLUMNS = ["text", "body", "content", "description", "title"];

/** The form for a new job, in three steps. `onDone` is called with the id of the job. */
export function JobForm({ models, onDone, onFind }: { models: Model[]; onDone: (id: string) => void; onFind: (text: string) => void }) {
  const [fields, setFields] = useState<JobFields>(EMPTY);
  const [settings, setSettings] = useState<Settings>({ ...UNSET, labels: "" });
  const [file, setFile] = useState<File>();
  const [rowsPreview, setRowsPreview] = useState<Preview>();
  const [previewError, setPreviewError] = useState("");
  const { isBusy, notice, refusal, runAction } = useAction();
  const fitting = useMemo(() => models.filter((model) => model.tasks.includes(fields.operation)), [models, fields.operation]);
  useEffect(() => {
    setFields((old) => (fitting.some((model) => model.id === old.model) ? old : { ...old, model: [...fitting].sort((first, second) => sortRank(first) - sortRank(second))[0]?.id ?? "" }));
  }, [fitting]);
  const model = fitting.find((model) => model.id === fields.model);
  const isValid = !Object.values(faultsOf(fields.operation, settings, model)).some(Boolean);
  const hasData = Boolean(file) !== Boolean(fields.url.trim());
  const isUnreadable = Boolean(previewError) && !fields.input; // a named format overrides the ending of the file's name
  const isReady = !isBusy && isValid && Boolean(fields.model) && hasData && !isUnreadable;
  const request = useMemo(() => (isValid ? requestOf(fields, settings, model) : undefined), [fields, settings, model, isValid]);

  async function chooseFile(next: File | undefined) {
    setFile(next);
    setRowsPreview(undefined);
    setPreviewError("");
    if (!next) return;
    try {
      const nextPreview = await preview(next);
      setRowsPreview(nextPreview);
      const text = TEXT_COLUMNS.find((name) => nextPreview.columns.includes(name)) ?? nextPreview.columns[0];
      setFields((old) => ({
        ...old, // edited fields stay
        text: old.text === EMPTY.text && text ? `{${text}}` : old.text,
        id: old.id || (nextPreview.columns.includes("id") ? "id" : ""),
        name: old.name || next.name,
      }));
    } catch (error) {
      setPreviewError((error as Error).message);
    }
  }

  async function submit(event: Event) {
    event.preventDefault();
    if (!request) return;
    await runAction(async () => {
      const id = await submitJob(request, file);
      onDone(id);
      return `Submitted as ${id}.`;
    });
  }
  const set = <N extends keyof JobFields>(name: N, value: JobFields[N]) => setFields((old) => ({ ...old, [name]: value }));
  const field = (name: TextField, title: string, placeholder = "", isNumber = false) => (
    <label>
      {title}
      <input id={`job-${name}`} inputmode={isNumber ? "numeric" : "text"} pattern={isNumber ? "[0-9]*" : undefined} value={fields[name]} placeholder={placeholder} spellcheck={false} autocomplete="off" onInput={(event) => set(name, event.currentTarget.value)} />
    </label>
  );
  const check = (name: "cache" | "expires" | "alone", title: string) => (
    <label class="chip">
      <input id={`job-${name}`} type="checkbox" checked={fields[name]} onChange={(event) => set(name, event.currentTarget.checked)} />
      {title}
    </label>
  );
  const template = (name: "text" | "query" | "document", title: string) => (
    <label class="wide">
      {title}
      <textarea id={`job-${name}`} rows={2} spellcheck={false} value={fields[name]} onInput={(event) => set(name, event.currentTarget.value)} />
    </label>
  );
  const choice = <N extends "operation" | "input" | "format" | "boundary">(name: N, title: string, options: readonly JobFields[N][], names: Partial<Record<string, string>> = {}) => (
    <label>
      {title}
      <select id={`job-${name}`} value={fields[name]} onChange={(event) => set(name, event.currentTarget.value as JobFields[N])}>
        {options.map((choice) => <option value={choice}>{names[choice] ?? choice}</option>)}
      </select>
    </label>
  );
  const isImage = Boolean(fields.image.trim());
  const isDocument = isChunked(fields) && Boolean(fields.documents.trim());
  const copiedColumns = splitList(fields.keep);
  const templateField = fields.operation === "score" ? "document" : "text";
  return (
    <form class="steps" id="job-form" aria-label="New job" onSubmit={submit}>
      <fieldset class="panel">
        <legend>1. Data</legend>
        <div class="fields">
          <label>
            File of rows: CSV, JSON Lines or Parquet
            <input id="job-file" type="file" accept=".jsonl,.csv,.parquet" onChange={(event) => void chooseFile(event.currentTarget.files?.[0])} />
          </label>
          {field("url", "or an address that the server allows", "s3://bucket/rows/")}
          {choice("input", "Format of the input", ["", ...INPUTS], { "": "by the name of the file" })}
        </div>
        {file && fields.url.trim() && <p class="bad" role="alert">A job reads a file or an address, not both.</p>}
        {previewError && <p class="bad" role="alert">{`${file?.name}: ${previewError}`}</p>}
        {rowsPreview && <PreviewRows preview={rowsPreview} onColumn={isImage || isDocument ? undefined : (name) => set(templateField, fields[templateField] === EMPTY[templateField] || !fields[templateField].trim() ? `{${name}}` : `${fields[templateField]}\n{${name}}`)} />}
        <div class="fields">{field("id", "Column of ids", "by default the number of the row")}</div>
      </fieldset>
      <fieldset class="panel">
        <legend>2. Model</legend>
        <div class="fields">
          {choice("operation", "Operation", OPERATIONS)}
          <Picker id="job-model" label="Model" models={fitting} value={fields.model} onChange={(id) => set("model", id)} onFind={onFind} />
          {fields.operation !== "score" && field("image", "Column of images, in place of the text")}
        </div>
        {!isImage && fields.operation === "encode" && (
          <div class="fields">
            {field("chunk", "Cut each text into chunks of at most this many tokens", "texts stay whole", true)}
            {isChunked(fields) && (
              <>
                {choice("boundary", "A chunk ends at the end of a", BOUNDARIES)}
                {field("overlap", "Tokens that a chunk repeats from the one before", "0", true)}
                {field("least", "Fewest tokens of a chunk", "0", true)}
                {field("documents", "Column of documents (PDF, Word ..), in place of the text")}
                {fields.documents.trim() && field("parser", "Model that parses the documents", "docling")}
                {check("alone", "Encode each chunk alone, without the rest of its text")}
              </>
            )}
          </div>
        )}
        {!isImage && !isDocument && fields.operation !== "score" && template("text", "Text: columns in braces, \\n is a line break")}
        {!isImage && !isDocument && rowsPreview && <FirstText preview={rowsPreview} template={fields[templateField].replaceAll("\\n", "\n")} />}
        {!isImage && fields.operation === "score" && <>{template("query", "Query: columns in braces")}{template("document", "Document: columns in braces")}</>}
        <Controls prefix="job-with-" verb={fields.operation} model={model} settings={settings} set={(name, value) => setSettings((old) => ({ ...old, [name]: value }))} />
        <JsonParameters prefix="job-with-" verb={fields.operation} model={model} settings={settings} set={(name, value) => setSettings((old) => ({ ...old, [name]: value }))} />
      </fieldset>
      <fieldset class="panel">
        <legend>3. Destination</legend>
        <div class="fields">
          {choice("format", "Format of the output", OUTPUTS)}
          {field("place", "Address of the output", "stored with the job, for download")}
          {field("keep", "Columns copied from the input", "title, url")}
          {field("name", "Name of the job")}
        </div>
        {rowsPreview && !rowsPreview.isTooLong && (
          <p class="row" id="job-copied">
            <span class="dim">Press a column to copy it:</span>
            {rowsPreview.columns.map((name) => <button type="button" class={`chip ${copiedColumns.includes(name) ? "on" : ""}`} aria-pressed={copiedColumns.includes(name)} onClick={() => set("keep", (copiedColumns.includes(name) ? copiedColumns.filter((column) => column !== name) : [...copiedColumns, name]).join(", "))}>{name}</button>)}
          </p>
        )}
        <details id="job-more">
          <summary>Deadline, times of day, speed, database</summary>
          <div class="fields">
            <label>
              Deadline
              <input id="job-deadline" type="datetime-local" value={fields.deadline} onInput={(event) => set("deadline", event.currentTarget.value)} />
            </label>
            {fields.deadline && check("expires", "Skip rows that have not run by then")}
            {field("windows", "Times of day at which the job runs", "22:00-06:00")}
            {field("zone", "Time zone of these times", "UTC")}
            {field("tokens", "Most tokens per second", "no limit", true)}
            {field("rows", "Rows of each part of the output", "10000", true)}
            {field("pool", "Pool of workers", "the default")}
            {field("sink", "Database that gets the vectors", "a name of SIE_JOBS_SINKS")}
            {fields.sink.trim() && field("collection", "Collection or table of the database")}
            {check("cache", "Reuse answers of earlier jobs")}
          </div>
        </details>
      </fieldset>
      <div>
        <span class="row">
          <button type="submit" id="job-submit" disabled={!isReady}>Submit</button>
          {!hasData && <span class="dim">Step 1 needs a file or an address.</span>}
          {isUnreadable && <span class="dim">Step 1 needs a file with readable rows, or the format of the input.</span>}
        </span>
        <p role="status">{isBusy ? (file ? `sending ${file.name}` : "submitting") : notice}</p>
        {refusal && <p class="bad" role="alert">{refusal}</p>}
        {request && hasData && <CodeSamples programs={jobPrograms({ request, file: file?.name ?? "" })} title="The same job as" />}
      </div>
    </form>
  );
}

const COLUMN = /\{([^{}]+)\}/g;
const MAX_SHOWN = 300; // characters

/** The text of the first row, as the model will read it. */
function FirstText({ preview: { columns, rows: [first] }, template }: { preview: Preview; template: string }) {
  if (!first) return null;
  const text = template.replace(COLUMN, (whole, name: string) => first[columns.indexOf(name)] ?? whole);
  return (
    <div id="job-first-text">
      <p class="dim">The first row reads:</p>
      <pre class="code">{shorten(text, MAX_SHOWN)}</pre>
    </div>
  );
}

/** The columns and the first rows of a file. `onColumn` is called with a pressed column. */
function PreviewRows({ preview: { columns, rows, count, isTooLong }, onColumn }: { preview: Preview; onColumn?: ((name: string) => void) | undefined }) {
  if (isTooLong) return <p id="job-preview" class="dim">The first row is too long to be shown.</p>;
  return (
    <div id="job-preview">
      <p class="dim">{[count === undefined ? "" : `${count} rows. `, "Columns", onColumn ? " (press one to put it into the text): " : ": "].join("")}</p>
      <p class="row">{columns.map((name) => <button type="button" class="chip" disabled={!onColumn} onClick={() => onColumn?.(name)}>{name}</button>)}</p>
      {rows.length > 0 && (
        <Table label="First rows" columns={columns}>
          {rows.map((row) => <tr>{row.map((value) => <td title={value}>{shorten(value, 60)}</td>)}</tr>)}
        </Table>
      )}
    </div>
  );
}
