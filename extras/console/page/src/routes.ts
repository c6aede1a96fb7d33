/** The view that the page shows is in its address behind the `#`, so that reload and back keep it. */

import { useEffect, useState } from "preact/hooks";

export const VIEWS = { playground: "Playground", models: "Models", jobs: "Jobs", cluster: "Cluster" } as const;
export type View = keyof typeof VIEWS;

/** An address: the view, the parts behind it, and the query. The id of a model has slashes, so it is several parts. */
export interface Route {
  view: View;
  parts: string[];
  query: URLSearchParams;
}

/** Decode a part of an address. A part whose percent signs are no escapes stays unchanged. */
function decodePart(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Parse the part of an address behind the `#`. */
function parseRoute(hash: string): Route {
  const [path = "", query = ""] = hash.slice(1).split("?");
  const [name = "", ...parts] = path.split("/").map(decodePart);
  return { view: Object.hasOwn(VIEWS, name) ? (name as View) : "playground", parts, query: new URLSearchParams(query) };
}

const encodePart = (text: string): string => text.split("/").map((part) => encodeURIComponent(part).replaceAll("%3A", ":")).join("/");

/** Return the address of a view with its parts, any of which may have slashes. */
export function href(view: View, parts: string[] = [], query: Record<string, string> = {}): string {
  const params = new URLSearchParams(Object.entries(query).filter(([, value]) => value));
  return `#${[view, ...parts.filter(Boolean).map(encodePart)].join("/")}${params.size ? `?${params}` : ""}`;
}

/** Go to an address of `href`, as a step in the history of the browser. */
export function navigate(address: string): void {
  location.hash = address;
}

/** The route of the present address. */
export function useRoute(): Route {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const update = () => setHash(location.hash);
    window.addEventListener("hashchange", update);
    return () => window.removeEventListener("hashchange", update);
  }, []);
  return parseRoute(hash);
}
