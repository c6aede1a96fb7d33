import type { ComponentChildren, VNode } from "preact";

interface Props {
  label: string;
  columns: (string | VNode | { number: string })[];
  /** The class of the table. */
  class?: string;
  /** The id or the class of the body. */
  rows?: { id: string } | { class: string };
  role?: "region" | "group";
  isTall?: boolean;
  children: ComponentChildren;
}

/** A table that scrolls if the page is too narrow for it. */
export function Table({ label, columns, class: tableClass, rows = undefined, role = "region", isTall = false, children }: Props) {
  return (
    <div class={isTall ? "scroll tall" : "scroll"} tabIndex={0} role={role} aria-label={label}>
      <table class={tableClass}>
        <thead><tr>{columns.map((column) => (typeof column === "object" && "number" in column ? <th scope="col" class="number">{column.number}</th> : <th scope="col">{column}</th>))}</tr></thead>
        <tbody {...rows}>{children}</tbody>
      </table>
    </div>
  );
}
