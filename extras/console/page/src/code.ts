/** Programs that a user may copy, and the literals in them. */

import { urlOf } from "./api";

/** A program. The page shows `preview`, whose long texts may be shortened; the button copies `full()`. */
export interface Program {
  name: string;
  preview: string;
  full: () => string;
}

/** Return a shell command as a program. */
export const shellCommand = (text: string, name = text): Program => ({ name, preview: `${text}\n`, full: () => `${text}\n` });

/** Quote a text as one word of a shell, without expansion. */
export const shellQuote = (text: string): string => (/^[\w./:@%+,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** Return the base address of this gateway for a client. */
export const serverUrl = (): string => urlOf("").replace(/\/$/, "");

const CONSTANTS = { true: "True", false: "False", null: "None" } as const;

/** Return a JSON value as a literal of Python. A JSON string is also a Python string. */
export function pythonLiteral(value: unknown, indent = ""): string {
  const inner = `${indent}    `;
  if (Array.isArray(value)) {
    if (!value.some((value) => value !== null && typeof value === "object")) return `[${value.map((value) => pythonLiteral(value)).join(", ")}]`;
    return `[\n${value.map((value) => `${inner}${pythonLiteral(value, inner)},\n`).join("")}${indent}]`;
  }
  if (value !== null && typeof value === "object") {
    return `{${Object.entries(value).map(([name, member]) => `${JSON.stringify(name)}: ${pythonLiteral(member, indent)}`).join(", ")}}`;
  }
  const text = JSON.stringify(value);
  return text in CONSTANTS ? CONSTANTS[text as keyof typeof CONSTANTS] : text;
}
