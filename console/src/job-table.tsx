/** What the tables of jobs and of batches share. */

import { useState } from "preact/hooks";

export const EVERY_MS = 2_000;

export interface Paging {
  /** The id behind which the page begins, empty for the first. */
  after: string;
  setSteps: (change: (old: string[]) => string[]) => void;
}

/** Pages of a list that is read on from an id: the ids of all pages up to this one. */
export function usePages(): Paging {
  const [steps, setSteps] = useState<string[]>([]);
  return { after: steps.at(-1) ?? "", setSteps };
}

/** `next`: where the page that follows begins, empty on the last one. */
export function Pages({ noun, pages, next }: { noun: string; pages: Paging; next: string }) {
  if (!pages.after && !next) return null;
  return (
    <p class="row">
      <button type="button" disabled={!pages.after} onClick={() => pages.setSteps((old) => old.slice(0, -1))}>{`Newer ${noun}`}</button>
      <button type="button" disabled={!next} onClick={() => pages.setSteps((old) => [...old, next])}>{`Older ${noun}`}</button>
    </p>
  );
}

/** A bar, with the same in words. `of` null: nobody knows it yet, or never will where it `isOver`. */
export function Progress({ name, done, of, isOver = false }: { name: string; done: number; of: number | null | undefined; isOver?: boolean }) {
  const share = of == null ? "" : of ? ` (${Math.floor((100 * done) / of)} %)` : "";
  return (
    <span class="bar">
      <progress max={Math.max(1, of ?? 1)} value={of == null ? 0 : of ? done : 1} aria-label={`Progress of ${name}`} />
      <span>{of == null ? (isOver ? "none was read" : "not counted yet") : `${done} of ${of}${share}`}</span>
    </span>
  );
}
