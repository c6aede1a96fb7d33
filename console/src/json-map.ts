/** Parameters that a person writes as JSON. */

/** A map that was written as JSON, undefined where nothing was. Raises SyntaxError. */
export function parsed(text: string): Record<string, unknown> | undefined {
  if (!text.trim()) return undefined;
  const value: unknown = JSON.parse(text);
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new SyntaxError("expected a map, such as {\"threshold\": 0.3}");
  return value as Record<string, unknown>;
}

/** Why a text is no such map, empty where it is one. */
export function complaint(text: string): string {
  try {
    parsed(text);
    return "";
  } catch (error) {
    return (error as SyntaxError).message;
  }
}
