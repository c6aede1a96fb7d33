/** The address of what the page shows: a view and its parts behind the `#`, so that reload and back keep it. */

import { useEffect, useState } from "preact/hooks";

export const VIEWS = { playground: "Playground", models: "Models", jobs: "Jobs", cluster: "Cluster" } as const;
export type View = keyof typeof VIEWS;

/** `parts`: behind the view. The last part of a model's address is its id, which has slashes of its own. */
export interface Route {
  view: View;
  parts: string[];
  query: URLSearchParams;
}

/** A part of an address; as it stands where its percent signs are no escapes. */
function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function routeOf(hash: string): Route {
  const [path = "", query = ""] = hash.slice(1).split("?");
  const [name = "", ...parts] = path.split("/").map(decoded);
  return { view: name in VIEWS ? (name as View) : "playground", parts, query: new URLSearchParams(query) };
}

const written = (text: string): string => text.split("/").map((part) => encodeURIComponent(part).replaceAll("%3A", ":")).join("/");

/** The address of a view with its parts, any of which may have slashes. */
export function href(view: View, parts: string[] = [], query: Record<string, string> = {}): string {
  const named = new URLSearchParams(Object.entries(query).filter(([, value]) => value));
  return `#${[view, ...parts.filter(Boolean).map(written)].join("/")}${named.size ? `?${named}` : ""}`;
}

/** `isStep`: back returns from there; else the address takes the place of the present one. */
export function navigate(address: string, isStep = true): void {
  if (isStep) location.hash = address;
  else location.replace(address);
}

export function useRoute(): Route {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return routeOf(hash);
}
