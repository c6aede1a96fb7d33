// Schemas of `extract`: the JSON Schema that is sent, and the check and conversion of the values in a reply.

import { isMap } from "./calls.js";
import { invalid } from "./errors.js";
import type { JSONSchema, StandardSchema } from "./types.js";

type Values = Record<string, unknown>;

const MAX_REFERENCES = 8; // maximum length of the chain of references that leads to one part, as at the server

/** Return the JSON Schema of a schema. Throws InvalidInputError if it has none. */
export function toJsonSchema(schema: unknown): JSONSchema {
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

/** Check and convert the values by the schema. Throws an Error that names a value that is missing or does not fit. */
export async function applySchema(schema: JSONSchema | StandardSchema, values: Values): Promise<unknown> {
  const standard = (schema as Partial<StandardSchema>)["~standard"];
  if (standard === undefined) {
    const missing = findMissing(schema as JSONSchema, schema as JSONSchema, values, "");
    if (missing) throw new Error(`${missing} was not found`);
    return values;
  }
  const { issues, ...valid } = await standard.validate(values);
  const [issue] = issues ?? [];
  if (issue) throw new Error(`${(issue.path ?? []).map(pathKey).join(".")}: ${issue.message}`);
  return valid.value;
}

function pathKey(part: unknown): string {
  return String(isMap(part) ? part["key"] : part);
}

/**
 * Return the path of the first required value that is missing. The server adds no value that the schema lacks. `steps`:
 * number of references and alternatives that led to `schema`, limited because a schema may refer to itself.
 */
function findMissing(root: JSONSchema, schema: JSONSchema, value: unknown, path: string, steps = 0): string | undefined {
  if (steps > MAX_REFERENCES) return undefined;
  if (schema["$ref"] !== undefined) return findMissing(root, resolveReference(root, schema["$ref"]), value, path, steps + 1);
  const { required, properties, items, anyOf, oneOf } = schema;
  if (Array.isArray(value)) return firstDefined(value.map((entry, place) => findMissing(root, asMap(items), entry, `${path}[${place}]`)));
  if (!isMap(value)) return undefined;
  const options = (anyOf ?? oneOf) as JSONSchema[] | undefined;
  if (options) return firstDefined(options.map((option) => findMissing(root, option, value, path, steps + 1)));
  const prefix = path && `${path}.`;
  const absent = ((required ?? []) as string[]).find((name) => !Object.hasOwn(value, name));
  if (absent !== undefined) return prefix + absent;
  const present = Object.entries(asMap(properties)).filter(([name]) => Object.hasOwn(value, name));
  return firstDefined(present.map(([name, inner]) => findMissing(root, asMap(inner), value[name], prefix + name)));
}

/** Return the schema of a reference: `#/$defs/NAME` or `#/definitions/NAME`. The server refuses all others. */
function resolveReference(root: JSONSchema, reference: unknown): JSONSchema {
  const [, group, name] = /^#\/(\$defs|definitions)\/(.+)$/.exec(String(reference)) ?? [];
  const definitions = asMap(group && root[group]);
  return name !== undefined && Object.hasOwn(definitions, name) ? asMap(definitions[name]) : {};
}

function asMap(schema: unknown): JSONSchema {
  return isMap(schema) ? schema : {};
}

function firstDefined(paths: (string | undefined)[]): string | undefined {
  return paths.find((path) => path !== undefined);
}
