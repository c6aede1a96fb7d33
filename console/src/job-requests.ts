/** A job as it is sent, and as programs that submit it. */

import type { JobRequest } from "sie-client";
import { readKey } from "./api";
import { type Program, pythonLiteral, shellQuote, serverUrl } from "./code";

/** A job, and the name of the file that is sent before it; `source.file` empty: the request says what is read. */
export interface Submission {
  request: JobRequest;
  file: string;
}

const PLACE = "FILE_ID"; // of the id, before the file is sent

/** What a job reads, as a program of Python or of a shell names it. */
const sourceOf = ({ request: { input }, file }: Submission): string => file || input.file || input.url || "";

function asCurl({ request, file }: Submission): string {
  const token = readKey() ? [`-H "Authorization: Bearer $SIE_API_KEY"`] : [];
  const post = ["curl -sS", ...token, "-H 'Content-Type: application/json'", "--data-binary @-", shellQuote(`${serverUrl()}/v1/jobs`)].join(" \\\n  ");
  if (!file) return `${post} <<'END'\n${JSON.stringify(request)}\nEND\n`;
  const send = ["curl -sS", ...token, "-F purpose=jobs", `-F ${shellQuote(`file=@"${file}"`)}`, shellQuote(`${serverUrl()}/v1/files`)].join(" \\\n  ");
  const body = JSON.stringify({ ...request, input: { ...request.input, file: PLACE } });
  return `file=$(${send} | grep -o 'file-[0-9a-f]\\{32\\}' | head -n 1)\nsed "s/${PLACE}/$file/" <<'END' | ${post}\n${body}\nEND\n`;
}

function asPython(submission: Submission): string {
  const { model, input, output, ...rest } = submission.request;
  const { file: _file, url: _url, format, ...columns } = input;
  const options = { ...columns, ...(format ? { input_format: format } : {}), ...(output ? { output } : {}), ...rest };
  const named = Object.entries(options).map(([name, value]) => `        ${name}=${pythonLiteral(value)},`);
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
    ...named,
    "    )",
    "    job.wait()",
    "    print(job.state, job.counts)",
    ...(output?.url ? [] : ['    job.download("output")']),
    "",
  ].join("\n");
}

// options of `sie jobs submit` whose names are not those of the request
const FLAGS: Record<string, string> = { format: "input-format", windows: "window" };

function asCommand(submission: Submission): string {
  const { model, input, output = {}, params = {}, metadata = {}, deadline, ...rest } = submission.request;
  const { file: _file, url: _url, chunks, context, ...columns } = input;
  const { url, ...written } = output;
  const rule = typeof chunks === "object" && chunks ? Object.entries(chunks).map(([name, value]) => `${name}=${value}`).join(",") : chunks;
  const flag = (name: string, value: unknown): string[] => {
    if (Array.isArray(value)) return value.flatMap((value) => flag(name, value));
    if (value === undefined || value === false || value === "") return [];
    return [value === true ? `--${name}` : `--${name} ${shellQuote(String(value))}`];
  };
  const options = [
    ...Object.entries({ ...columns, ...rest }).flatMap(([name, value]) => flag(FLAGS[name] ?? name.replaceAll("_", "-"), value)),
    ...flag("chunks", rule),
    ...flag("no-context", context === false),
    ...flag("output", url),
    ...Object.entries(written).flatMap(([name, value]) => flag(name, value)),
    ...Object.entries(params).flatMap(([name, value]) => flag("param", `${name}=${JSON.stringify(value)}`)),
    ...Object.entries(metadata).flatMap(([name, value]) => flag("metadata", `${name}=${value}`)),
    ...(deadline ? flag("deadline", new Date(deadline * 1000).toISOString()) : []),
    ...flag("url", serverUrl()),
  ];
  const command = `${readKey() ? 'SIE_AUTH_TOKEN="$SIE_API_KEY" ' : ""}sie jobs submit ${shellQuote(model)} ${shellQuote(sourceOf(submission))}`;
  return `${[command, ...options].join(" \\\n  ")}\n`;
}

export const jobPrograms = (submission: Submission): Program[] =>
  ([["curl", asCurl], ["Python", asPython], ["CLI", asCommand]] as const).map(([name, written]) => {
    const shown = written(submission);
    return { name, shown, whole: () => shown };
  });
