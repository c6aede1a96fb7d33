/** The requests of the playground, and the same requests as code. */

import { SIEError } from "sie-client";
import { urlOf, sendRequest, readKey, type GatewayRequest } from "./api";
import { type Program, pythonLiteral, shellQuote, serverUrl } from "./code";
import type { Model, Reply } from "./types";

export type Verb = "encode" | "score" | "extract";
export type Medium = string | { data: string; format: string };

export interface Input {
  text?: string;
  images?: Medium[];
  document?: Medium;
  audio?: Medium;
  metadata?: unknown;
  chunks?: { max_tokens: number };
  context?: boolean;
}

interface Body {
  query?: Input;
  items: Input[];
  params?: Record<string, unknown>;
}

export interface Call {
  verb: Verb;
  model: string;
  body: Body;
}

/** The calls of one model and their replies, or the refusal. Late interaction and chunks need two calls: the query, then the
 * documents. */
export interface Outcome {
  model: Model;
  calls: Call[];
  replies: Reply[];
  refusal?: SIEError;
}

const requestOf = ({ verb, model, body }: Call): GatewayRequest => ({ method: "POST", path: `/v1/${verb}/${model}`, body, explain: true });

const LOADING_CODES = new Set(["MODEL_LOADING", "PROVISIONING"]); // the same request succeeds once the model is loaded
const REPEAT_MS = 1_000;

/** Send the calls of a model, and repeat them while the model is being loaded, until `signal` aborts. */
export async function runCalls(model: Model, calls: Call[], signal: AbortSignal): Promise<Outcome> {
  for (;;) {
    try {
      return { model, calls, replies: await Promise.all(calls.map((call) => sendRequest<Reply>({ ...requestOf(call), signal }))) };
    } catch (error) {
      if (!(error instanceof SIEError)) throw error;
      if (!LOADING_CODES.has(error.code) || signal.aborted) return { model, calls, replies: [], refusal: error };
      await new Promise((resolve) => window.setTimeout(resolve, REPEAT_MS));
    }
  }
}

const FILE_PREVIEW = 60; // characters of a file in the code on the page

/** Return a call with shortened files, for the page: a browser takes seconds to lay out a megabyte of base64. */
function shortenFiles(call: Call): Call {
  const shortenValue = (_: string, value: unknown): unknown =>
    typeof value === "string" && value.startsWith("data:") && value.length > 3 * FILE_PREVIEW
      ? `${value.slice(0, FILE_PREVIEW)}…${value.length - FILE_PREVIEW} more characters…`
      : value;
  return { ...call, body: JSON.parse(JSON.stringify(call.body, shortenValue)) as Body };
}

/** Return a call as a curl command. The body is a here-document: it may be longer than an argument, and the shell expands
 * nothing in it. The body is one line of JSON, so it cannot contain the line that ends the here-document. */
function asCurl(call: Call): string {
  const parts = [`curl -sS ${shellQuote(urlOf(requestOf(call).path))}`, "-H 'Content-Type: application/json'"];
  if (readKey()) parts.push('-H "Authorization: Bearer $SIE_API_KEY"');
  parts.push("-H 'X-SIE-Explain: 1'", "--data-binary @- <<'END'");
  return `${parts.join(" \\\n  ")}\n${JSON.stringify(call.body)}\nEND\n`;
}

// The parameters that are arguments of the Python client. The others go into its argument `options`.
const PYTHON_ARGUMENTS = new Set([
  "instruction", "truncate", "max_seq_length", "profile", "lora_id", "on_item_error", "output_types", "output_dtype",
  "is_query", "dimensions", "normalize", "labels", "threshold", "output_schema", "label_groups", "label_thresholds",
]);
const PYTHON_PRINT: Record<Verb, string[]> = {
  encode: ["for result in results:", '    print({name: result[name] for name in ("dense", "sparse", "multivector", "chunks") if name in result})'],
  score: ['for entry in results["scores"]:', '    print(entry["rank"], entry["item_id"], entry["score"])'],
  extract: [
    "for result in results:",
    '    print({name: result[name] for name in ("entities", "relations", "classifications", "objects", "data")})',
  ],
};

/** Return a call as a program with the Python client. */
function asPython({ verb, model, body }: Call): string {
  const params = Object.entries(body.params ?? {});
  const args = params.filter(([name]) => PYTHON_ARGUMENTS.has(name)).map(([name, value]) => `, ${name}=${pythonLiteral(value)}`);
  const rest = Object.fromEntries(params.filter(([name]) => !PYTHON_ARGUMENTS.has(name)));
  const options = Object.keys(rest).length ? `, options=${pythonLiteral(rest)}` : "";
  return [
    ...(readKey() ? ["import os", ""] : []),
    "from sie_client import SIEClient",
    "",
    ...(body.query ? [`query = ${pythonLiteral(body.query)}`] : []),
    `items = ${pythonLiteral(body.items)}`,
    `with SIEClient(${JSON.stringify(serverUrl())}${readKey() ? ', api_key=os.environ["SIE_API_KEY"]' : ""}) as client:`,
    `    results = client.${verb}(${JSON.stringify(model)}, ${body.query ? "query, " : ""}items${args.join("")}${options}, explain=True)`,
    ...PYTHON_PRINT[verb],
    "",
  ].join("\n");
}

/** Return a call as a program with the TypeScript client. */
function asTypeScript({ verb, model, body }: Call): string {
  const client = [`baseUrl: ${JSON.stringify(serverUrl())}`, ...(readKey() ? ["apiKey: process.env.SIE_API_KEY"] : [])];
  const options = [...(body.params ? [`params: ${JSON.stringify(body.params)}`] : []), "explain: true"];
  return [
    'import { SIEClient } from "sie-client";',
    "",
    `const client = new SIEClient({ ${client.join(", ")} });`,
    ...(body.query ? [`const query = ${JSON.stringify(body.query)};`] : []),
    `const items = ${JSON.stringify(body.items, null, 2)};`,
    `const results = await client.${verb}(${JSON.stringify(model)}, ${body.query ? "query, " : ""}items, { ${options.join(", ")} });`,
    "console.log(results);",
    "",
  ].join("\n");
}

const FORMATS: [string, (call: Call) => string][] = [["curl", asCurl], ["Python", asPython], ["TypeScript", asTypeScript]];

/** Return a call as programs. Their previews have shortened files. */
export const callPrograms = (call: Call): Program[] =>
  FORMATS.map(([name, format]) => ({ name, preview: format(shortenFiles(call)), full: () => format(call) }));
