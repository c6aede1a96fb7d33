/** Requests to the gateway that served this page, by the TypeScript client. The key stays in the session storage of the
 * page. */

import { type CallOptions, SIEClient } from "sie-client";

const STORED = "sie.key";
const LIMIT_MS = 30_000; // of what is read

export interface GatewayRequest {
  method: string;
  path: string;
  body?: unknown;
  explain?: boolean;
}

export const readKey = (): string => sessionStorage.getItem(STORED) ?? "";

export function storeKey(value: string): void {
  if (value) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
}

// this script is `console/main.js` below the prefix that the page has behind a proxy. The address of the page does not
// tell it: it may lack the final slash.
const ROOT = new URL("..", import.meta.url);

/** The address of a path, below that prefix. */
export const urlOf = (path: string): string => new URL(path.replace(/^\//, ""), ROOT).href;

/** A person waits: what is refused for now is shown, and not asked again. Throws SIEError for a key that cannot be sent. */
export const createClient = (): SIEClient =>
  new SIEClient({
    baseUrl: urlOf(""),
    apiKey: readKey(),
    waitForCapacity: false,
    fetch: (input, init) => fetch(input, { ...init, cache: "no-store" }),
  });

/** Throws SIEError. */
export const sendRequest = async <T>({ method, path, ...options }: GatewayRequest & CallOptions): Promise<T> => createClient().json<T>(method, path, options);

export const getJson = <T>(path: string, limitMs = LIMIT_MS): Promise<T> =>
  sendRequest<T>({ method: "GET", path, signal: AbortSignal.timeout(limitMs) });
