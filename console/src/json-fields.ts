/** Parameters that a person writes as JSON. */

const isMap = (value: unknown): value is Record<string, unknown> => value !== null && typeof value === "object" && !Array.isArray(value);

/** A map that was written as JSON, undefined where nothing was. Raises SyntaxError. */
export function parseMap(text: string): Record<string, unknown> | undefined {
  const value = json(text);
  if (value === undefined || isMap(value)) return value;
  throw new SyntaxError('expected a map, such as {"threshold": 0.3}');
}

/** A list that was written as JSON, undefined where nothing was. Raises SyntaxError. */
export function parseList(text: string): unknown[] | undefined {
  const value = json(text);
  if (value === undefined || Array.isArray(value)) return value;
  throw new SyntaxError('expected a list, such as [{"text": "Now!", "labels": ["urgent"]}]');
}

const json = (text: string): unknown => (text.trim() ? (JSON.parse(text) as unknown) : undefined);

/** Why a text is not what `read` expects, empty where it is. */
export function jsonFault(text: string, read: (text: string) => unknown = parseMap): string {
  try {
    read(text);
    return "";
  } catch (error) {
    return (error as SyntaxError).message;
  }
}
