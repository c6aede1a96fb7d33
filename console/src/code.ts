/** What programs that a person may copy are written with. */

import { urlOf } from "./api";

/** `shown`: on the page, where it may be cut. `whole`: what is copied. */
export interface Program {
  name: string;
  shown: string;
  whole: () => string;
}

/** A command of a shell, by its first words. */
export const shellCommand = (text: string, name = text): Program => ({ name, shown: `${text}\n`, whole: () => `${text}\n` });

/** A word of a shell, in which nothing is replaced. */
export const shellQuote = (text: string): string => (/^[\w./:@%+,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** Where this gateway is, as clients name it. */
export const serverUrl = (): string => urlOf("").replace(/\/$/, "");

const NAMES = { true: "True", false: "False", null: "None" } as const;

/** A literal of Python. Strings of JSON are strings of Python. */
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
  return text in NAMES ? NAMES[text as keyof typeof NAMES] : text;
}
