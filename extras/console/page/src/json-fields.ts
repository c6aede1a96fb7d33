/** Parameters that a user types as JSON. */

const isMap = (value: unknown): value is Record<string, unknown> => value !== null && typeof value === "object" && !Array.isArray(value);

/** Parse a JSON map; an empty text is undefined. Throws SyntaxError. */
export function parseMap(text: string): Record<string, unknown> | undefined {
  const value = parseJson(text);
  if (value === undefined || isMap(value)) return value;
  throw new SyntaxError('expected a map, such as {"threshold": 0.3}');
}

/** Parse a JSON list; an empty text is undefined. Throws SyntaxError. */
export function parseList(text: string): unknown[] | undefined {
  const value = parseJson(text);
  if (value === undefined || Array.isArray(value)) return value;
  throw new SyntaxError('expected a list, such as [{"text": "Now!", "labels": ["urgent"]}]');
}

const parseJson = (text: string): unknown => (text.trim() ? (JSON.parse(text) as unknown) : undefined);

/** Return the error of `parse` for a text, empty if there is none. */
export function jsonFault(text: string, parse: (text: string) => unknown = parseMap): string {
  try {
    parse(text);
    return "";
  } catch (error) {
    return (error as SyntaxError).message;
  }
}
