// Values by a schema: what is sent, and what the values of a reply become.

import { isMap } from "./calls.js";
import { invalid } from "./errors.js";
import type { JSONSchema, StandardSchema } from "./types.js";

type Values = Record<string, unknown>;

const MAX_REFERENCES = 8; // that lead to one part, the limit of the server

/** What the model fills in. Throws InvalidInputError for a schema without a JSON Schema. */
export function jsonSchema(schema: unknown): JSONSchema {
  const standard = isMap(schema) || typeof schema === "function" ? (schema as Partial<StandardSchema>)["~standard"] : undefined;
  if (standard === undefined && isMap(schema)) return schema;
  if (typeof standard?.jsonSchema?.input !== "function") {
    throw invalid("schema: expected a JSON Schema, or a schema of a library that gives one, such as zod 4.2", "schema");
  }
  try {
    return standard.jsonSchema.input({ target: "draft-2020-12" });
  } catch (error) {
    throw invalid(`schema: ${(error as Error).message}`, "schema", error);
  }
}

/** The values as the schema types them. Throws an Error that names the value that is missing or does not fit. */
export async function typed(schema: JSONSchema | StandardSchema, values: Values): Promise<unknown> {
  const standard = (schema as Partial<StandardSchema>)["~standard"];
  if (standard === undefined) {
    const missing = firstMissing(schema as JSONSchema, schema as JSONSchema, values, "");
    if (missing) throw new Error(`${missing} was not found`);
    return values;
  }
  const { issues, ...valid } = await standard.validate(values);
  const [issue] = issues ?? [];
  if (issue) throw new Error(`${(issue.path ?? []).map(step).join(".")}: ${issue.message}`);
  return valid.value;
}

function step(part: unknown): string {
  return String(isMap(part) ? part["key"] : part);
}

/** The path of a required value that is not there. The server fills in nothing that the schema does not have. `steps`:
 * references and alternatives that led to `schema`; they are bounded, because they may lead to themselves. */
function firstMissing(root: JSONSchema, schema: JSONSchema, value: unknown, path: string, steps = 0): string | undefined {
  if (steps > MAX_REFERENCES) return undefined;
  if (schema["$ref"] !== undefined) return firstMissing(root, definition(root, schema["$ref"]), value, path, steps + 1);
  const { required, properties, items, anyOf, oneOf } = schema;
  if (Array.isArray(value)) return first(value.map((entry, place) => firstMissing(root, part(items), entry, `${path}[${place}]`)));
  if (!isMap(value)) return undefined;
  const options = (anyOf ?? oneOf) as JSONSchema[] | undefined;
  if (options) return first(options.map((option) => firstMissing(root, option, value, path, steps + 1)));
  const prefix = path && `${path}.`;
  const absent = ((required ?? []) as string[]).find((name) => !Object.hasOwn(value, name));
  if (absent !== undefined) return prefix + absent;
  const present = Object.entries(part(properties)).filter(([name]) => Object.hasOwn(value, name));
  return first(present.map(([name, inner]) => firstMissing(root, part(inner), value[name], prefix + name)));
}

/** The schema that a reference leads to: `#/$defs/NAME` or `#/definitions/NAME`. The server refuses every other one. */
function definition(root: JSONSchema, reference: unknown): JSONSchema {
  const [, group, name] = /^#\/(\$defs|definitions)\/(.+)$/.exec(String(reference)) ?? [];
  const definitions = part(group && root[group]);
  return name !== undefined && Object.hasOwn(definitions, name) ? part(definitions[name]) : {};
}

function part(schema: unknown): JSONSchema {
  return isMap(schema) ? schema : {};
}

function first(paths: (string | undefined)[]): string | undefined {
  return paths.find((path) => path !== undefined);
}
