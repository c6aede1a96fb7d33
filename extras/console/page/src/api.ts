/** Requests to the gateway that served this page, by the TypeScript client. The API key is in the session storage of the
 * tab. */

import { type CallOptions, SIEClient } from "sie-client";

const STORAGE_KEY = "sie.key";
const GET_TIMEOUT_MS = 30_000;

export interface GatewayRequest {
  method: string;
  path: string;
  body?: unknown;
  explain?: boolean;
}

let pageKey = ""; // in a browser that stores nothing

/** Return the API key of this tab, empty if the user has not signed in. */
export function readKey(): string {
  try {
    return sessionStorage.getItem(STORAGE_KEY) ?? "";
  } catch {
    return pageKey;
  }
}

/** Store the API key of this tab; an empty one removes it. */
export function storeKey(value: string): void {
  pageKey = value;
  try {
    if (value) sessionStorage.setItem(STORAGE_KEY, value);
    else sessionStorage.removeItem(STORAGE_KEY);
  } catch {
    // the browser stores nothing
  }
}

// This script is `console/main.js` below the root, which has a prefix behind a proxy. The address of the page is no base
// for relative addresses: it may lack the final slash.
const ROOT = new URL("..", import.meta.url);

/** Return the address of a path of the API. */
export const urlOf = (path: string): string => new URL(path.replace(/^\//, ""), ROOT).href;

/** Return a client that does not repeat a request after a refusal: the page shows the refusal to the user. Throws SIEError
 * for a key that no header can hold. */
export const createClient = (): SIEClient =>
  new SIEClient({
    baseUrl: urlOf(""),
    apiKey: readKey(),
    waitForCapacity: false,
    fetch: (input, init) => fetch(input, { ...init, cache: "no-store" }),
  });

/** Options of a request that creates one object however often it is sent: it is sent again after a lost connection, not after
 * a refusal. */
export const REPEATABLE: CallOptions = { waitForCapacity: true, provisionTimeoutMs: 0, connectionTimeoutMs: 30_000 };

/** Send a request and return its JSON reply. Throws SIEError. */
export const sendRequest = async <T>({ method, path, ...options }: GatewayRequest & CallOptions): Promise<T> => createClient().json<T>(method, path, options);

/** Return the JSON reply to a GET. Throws SIEError, also after the timeout. */
export const getJson = <T>(path: string, timeoutMs = GET_TIMEOUT_MS): Promise<T> =>
  sendRequest<T>({ method: "GET", path, signal: AbortSignal.timeout(timeoutMs) });
