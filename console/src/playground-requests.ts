/** The requests of the playground, and the same as code. */

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

export interface Body {
  query?: Input;
  items: Input[];
  params?: Record<string, unknown>;
}

export interface Call {
  verb: Verb;
  model: string;
  body: Body;
}

/** What one model was asked, in one request or, for late interaction and chunks, in two: the query, then the documents. */
export interface Outcome {
  model: Model;
  calls: Call[];
  replies: Reply[];
  refusal?: SIEError;
}

const sent = ({ verb, model, body }: Call): GatewayRequest => ({ method: "POST", path: `/v1/${verb}/${model}`, body, explain: true });

const LOADING = new Set(["MODEL_LOADING", "PROVISIONING"]); // codes of what is answered once the model is loaded
const AGAIN_MS = 1_000;

/** Sends the calls, and again while the model is loaded, until the signal. */
export async function runCalls(model: Model, calls: Call[], signal: AbortSignal): Promise<Outcome> {
  for (;;) {
    try {
      return { model, calls, replies: await Promise.all(calls.map((call) => sendRequest<Reply>({ ...sent(call), signal }))) };
    } catch (error) {
      if (!(error instanceof SIEError)) throw error;
      if (!LOADING.has(error.code) || signal.aborted) return { model, calls, replies: [], refusal: error };
      await new Promise((resolve) => window.setTimeout(resolve, AGAIN_MS));
    }
  }
}

const FILE_SHOWN = 60; // characters of a file that code on the page begins with

/** A call with its files cut, for the page: a browser takes seconds to lay out a megabyte of base64. */
function shortened(call: Call): Call {
  const cut = (_: string, value: unknown): unknown =>
    typeof value === "string" && value.startsWith("data:") && value.length > 3 * FILE_SHOWN
      ? `${value.slice(0, FILE_SHOWN)}…${value.length - FILE_SHOWN} more characters…`
      : value;
  return { ...call, body: JSON.parse(JSON.stringify(call.body, cut)) as Body };
}

/** As a command of a shell. The body is a here-document, which may be longer than an argument, and in which nothing is
 * replaced. It is one line of JSON, so no line of it is the one that ends it. */
function asCurl(call: Call): string {
  const parts = [`curl -sS ${shellQuote(urlOf(sent(call).path))}`, "-H 'Content-Type: application/json'"];
  if (readKey()) parts.push('-H "Authorization: Bearer $SIE_API_KEY"');
  parts.push("-H 'X-SIE-Explain: 1'", "--data-binary @- <<'END'");
  return `${parts.join(" \\\n  ")}\n${JSON.stringify(call.body)}\nEND\n`;
}

// parameters that the Python client names; others go through its `options`
const NAMED = new Set([
  "instruction", "truncate", "max_seq_length", "profile", "lora_id", "on_item_error", "output_types", "output_dtype",
  "is_query", "dimensions", "normalize", "labels", "threshold", "output_schema", "label_groups", "label_thresholds",
]);
const PRINTED: Record<Verb, string[]> = {
  encode: ["for result in results:", '    print({name: result[name] for name in ("dense", "sparse", "multivector", "chunks") if name in result})'],
  score: ['for entry in results["scores"]:', '    print(entry["rank"], entry["item_id"], entry["score"])'],
  extract: [
    "for result in results:",
    '    print({name: result[name] for name in ("entities", "relations", "classifications", "objects", "data")})',
  ],
};

function asPython({ verb, model, body }: Call): string {
  const params = Object.entries(body.params ?? {});
  const named = params.filter(([name]) => NAMED.has(name)).map(([name, value]) => `, ${name}=${pythonLiteral(value)}`);
  const rest = Object.fromEntries(params.filter(([name]) => !NAMED.has(name)));
  const options = Object.keys(rest).length ? `, options=${pythonLiteral(rest)}` : "";
  return [
    ...(readKey() ? ["import os", ""] : []),
    "from sie_client import SIEClient",
    "",
    ...(body.query ? [`query = ${pythonLiteral(body.query)}`] : []),
    `items = ${pythonLiteral(body.items)}`,
    `with SIEClient(${JSON.stringify(serverUrl())}${readKey() ? ', api_key=os.environ["SIE_API_KEY"]' : ""}) as client:`,
    `    results = client.${verb}(${JSON.stringify(model)}, ${body.query ? "query, " : ""}items${named.join("")}${options}, explain=True)`,
    ...PRINTED[verb],
    "",
  ].join("\n");
}

/** As a program with the package sie-client. */
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

const CODE: [string, (call: Call) => string][] = [["curl", asCurl], ["Python", asPython], ["TypeScript", asTypeScript]];

/** A call as programs. What is shown has its files cut. */
export const callPrograms = (call: Call): Program[] =>
  CODE.map(([name, written]) => ({ name, shown: written(shortened(call)), whole: () => written(call) }));
