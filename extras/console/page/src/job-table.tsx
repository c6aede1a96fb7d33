/** Pages and progress bars for the tables of jobs and batches. */

import { useState } from "preact/hooks";

export const EVERY_MS = 2_000;

export interface Paging {
  /** The id after which the page begins, empty for the first page. */
  after: string;
  setSteps: (change: (old: string[]) => string[]) => void;
}

/** The present page of a list whose pages begin after an id. */
export function usePages(): Paging {
  const [steps, setSteps] = useState<string[]>([]); // the ids of the pages up to this one
  return { after: steps.at(-1) ?? "", setSteps };
}

/** The buttons for newer and older pages. `next` is the id after which the next page begins, empty on the last page. */
export function Pages({ noun, pages, next }: { noun: string; pages: Paging; next: string }) {
  if (!pages.after && !next) return null;
  return (
    <p class="row">
      <button type="button" disabled={!pages.after} onClick={() => pages.setSteps((old) => old.slice(0, -1))}>{`Newer ${noun}`}</button>
      <button type="button" disabled={!next} onClick={() => pages.setSteps((old) => [...old, next])}>{`Older ${noun}`}</button>
    </p>
  );
}

/** A progress bar with its figures. `of` is null while the rows are not counted. */
export function Progress({ name, done, of, isOver = false }: { name: string; done: number; of: number | null | undefined; isOver?: boolean }) {
  const share = of == null ? "" : of ? ` (${Math.floor((100 * done) / of)} %)` : "";
  return (
    <span class="bar">
      <progress max={Math.max(1, of ?? 1)} value={of == null ? 0 : of ? done : 1} aria-label={`Progress of ${name}`} />
      <span>{of == null ? (isOver ? "no rows were read" : "not counted yet") : `${done} of ${of}${share}`}</span>
    </span>
  );
}
