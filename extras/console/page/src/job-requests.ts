/** A job as programs that submit it. */

import type { JobRequest } from "sie-client";
import { readKey } from "./api";
import { type Program, pythonLiteral, shellQuote, serverUrl } from "./code";

/** A job, and the name of a local file that is uploaded before it. `file` is empty if the request names its input. */
interface Submission {
  request: JobRequest;
  file: string;
}

const PLACEHOLDER = "FILE_ID"; // for the id that the upload returns

/** Return the input of a job, as the Python client and the CLI name it. */
const sourceOf = ({ request: { input }, file }: Submission): string => file || input.file || input.url || "";

function asCurl({ request, file }: Submission): string {
  const token = readKey() ? [`-H "Authorization: Bearer $SIE_API_KEY"`] : [];
  const submit = ["curl -sS", ...token, "-H 'Content-Type: application/json'", "--data-binary @-", shellQuote(`${serverUrl()}/v1/jobs`)].join(" \\\n  ");
  if (!file) return `${submit} <<'END'\n${JSON.stringify(request)}\nEND\n`;
  const upload = ["curl -sS", ...token, "-F purpose=jobs", `-F ${shellQuote(`file=@"${file.replace(/["\\]/g, "\\$&")}"`)}`, shellQuote(`${serverUrl()}/v1/files`)].join(" \\\n  ");
  const body = JSON.stringify({ ...request, input: { ...request.input, file: PLACEHOLDER } });
  return `file=$(${upload} | grep -o 'file-[0-9a-f]\\{32\\}' | head -n 1)\nsed "s/${PLACEHOLDER}/$file/" <<'END' | ${submit}\n${body}\nEND\n`;
}

function asPython(submission: Submission): string {
  const { model, input, output, ...rest } = submission.request;
  const { file: _file, url: _url, format, ...columns } = input;
  const options = { ...columns, ...(format ? { input_format: format } : {}), ...(output ? { output } : {}), ...rest };
  const lines = Object.entries(options).map(([name, value]) => `        ${name}=${pythonLiteral(value)},`);
  const source = submission.file ? `Path(${pythonLiteral(submission.file)})` : pythonLiteral(sourceOf(submission));
  return [
    ...(readKey() ? ["import os"] : []),
    ...(submission.file ? ["from pathlib import Path"] : []),
    ...(readKey() || submission.file ? [""] : []),
    "from sie_client import SIEClient",
    "",
    `with SIEClient(${JSON.stringify(serverUrl())}${readKey() ? ', api_key=os.environ["SIE_API_KEY"]' : ""}) as client:`,
    "    job = client.jobs.submit(",
    `        ${pythonLiteral(model)},`,
    `        ${source},`,
    ...lines,
    "    )",
    "    job.wait()",
    "    print(job.state, job.counts)",
    ...(output?.url ? [] : ['    job.download("output")']),
    "",
  ].join("\n");
}

// The options of `sie jobs submit` that have other names than the fields of the request.
const FLAGS: Record<string, string> = { format: "input-format", windows: "window" };

function asCommand(submission: Submission): string {
  const { model, input, output = {}, params = {}, metadata = {}, deadline, ...rest } = submission.request;
  const { file: _file, url: _url, chunks, context, ...columns } = input;
  const { url, ...destination } = output;
  const chunking = typeof chunks === "object" && chunks ? Object.entries(chunks).map(([name, value]) => `${name}=${value}`).join(",") : chunks;
  const flag = (name: string, value: unknown): string[] => {
    if (Array.isArray(value)) return value.flatMap((value) => flag(name, value));
    if (value === undefined || value === false || value === "") return [];
    return [value === true ? `--${name}` : `--${name} ${shellQuote(String(value))}`];
  };
  const options = [
    ...Object.entries({ ...columns, ...rest }).flatMap(([name, value]) => flag(FLAGS[name] ?? name.replaceAll("_", "-"), value)),
    ...flag("chunks", chunking),
    ...flag("no-context", context === false),
    ...flag("output", url),
    ...Object.entries(destination).flatMap(([name, value]) => flag(name, value)),
    ...Object.entries(params).flatMap(([name, value]) => flag("param", `${name}=${JSON.stringify(value)}`)),
    ...Object.entries(metadata).flatMap(([name, value]) => flag("metadata", `${name}=${value}`)),
    ...(deadline ? flag("deadline", new Date(deadline * 1000).toISOString()) : []),
    ...flag("url", serverUrl()),
  ];
  const command = `${readKey() ? 'SIE_AUTH_TOKEN="$SIE_API_KEY" ' : ""}sie jobs submit ${shellQuote(model)} ${shellQuote(sourceOf(submission))}`;
  return `${[command, ...options].join(" \\\n  ")}\n`;
}

/** Return the programs that submit a job. */
export const jobPrograms = (submission: Submission): Program[] =>
  ([["curl", asCurl], ["Python", asPython], ["CLI", asCommand]] as const).map(([name, format]) => {
    const text = format(submission);
    return { name, preview: text, full: () => text };
  });
