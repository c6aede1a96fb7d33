/** Requests to the gateway that served this page. The key stays in the session storage of the page. */

const STORED = "sie.key";
const TIMEOUT_MS = 130_000; // above the longest budget of a request by default

export interface Sent {
  method: string;
  path: string;
  body?: unknown;
  explain?: boolean;
}

/** An answer that is an error, or no answer at all (status 0). */
export class Refusal extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string,
    readonly requestId: string,
  ) {
    super(message);
  }
}

export const key = (): string => sessionStorage.getItem(STORED) ?? "";

export function keep(value: string): void {
  if (value) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
}

/** The address of a path, below the prefix that this page has behind a proxy. */
export const address = (path: string): string => new URL(path.replace(/^\//, ""), new URL(".", location.href)).href;

/** Raises Refusal. */
export async function ask<T>(sent: Sent, timeoutMs = TIMEOUT_MS): Promise<T> {
  const headers: Record<string, string> = { accept: "application/json" };
  if (key()) headers["authorization"] = `Bearer ${key()}`;
  if (sent.body !== undefined) headers["content-type"] = "application/json";
  if (sent.explain) headers["x-sie-explain"] = "1";
  let answer: Response;
  try {
    answer = await fetch(address(sent.path), {
      method: sent.method,
      headers,
      body: sent.body === undefined ? undefined : JSON.stringify(sent.body),
      signal: AbortSignal.timeout(timeoutMs),
      cache: "no-store",
    });
  } catch {
    throw new Refusal("the gateway does not answer", 0, "", "");
  }
  const told: unknown = await answer.json().catch(() => ({}));
  if (answer.ok) return told as T;
  const error = (told as { error?: { message?: string; code?: string } }).error ?? {};
  const id = answer.headers.get("x-sie-request-id") ?? "";
  throw new Refusal(error.message ?? `status ${answer.status}`, answer.status, error.code ?? "", id);
}

export const get = <T>(path: string, timeoutMs?: number): Promise<T> => ask<T>({ method: "GET", path }, timeoutMs);

/** What the key of this page may do. Raises Refusal. */
export const scopes = async (): Promise<string[]> => (await get<{ scopes: string[] }>("/v1/whoami", 10_000)).scopes;
