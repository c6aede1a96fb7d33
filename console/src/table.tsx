import type { ComponentChildren, VNode } from "preact";

interface Props {
  label: string;
  columns: (string | VNode | { number: string })[];
  /** Of the table, and of its rows as a whole. */
  class?: string;
  rows?: { id: string } | { class: string };
  role?: "region" | "group";
  isTall?: boolean;
  children: ComponentChildren;
}

/** A table that scrolls on a page that is too narrow for it. */
export function Table({ label, columns, class: own, rows = undefined, role = "region", isTall = false, children }: Props) {
  return (
    <div class={isTall ? "scroll tall" : "scroll"} tabIndex={0} role={role} aria-label={label}>
      <table class={own}>
        <thead><tr>{columns.map((each) => (typeof each === "object" && "number" in each ? <th scope="col" class="number">{each.number}</th> : <th scope="col">{each}</th>))}</tr></thead>
        <tbody {...rows}>{children}</tbody>
      </table>
    </div>
  );
}
