/** The values that a model answers to a schema or to groups of labels, each with its evidence. */

import { Table } from "./table";
import type { Entity, Slot } from "./types";

const MOST = 200; // values that are shown

interface Value {
  path: string;
  value: unknown;
  score?: number | undefined;
  span?: Entity | undefined;
}

/** The values of an item in the order of its data. A span has the path of its value, a choice the path of its property. */
export function valuesOf({ data = {}, entities = [], classifications = [] }: Slot): Value[] {
  const spans = new Map(entities.map((entity) => [entity.label, entity]));
  const scores = new Map(classifications.map(({ label, score }) => [label, score]));
  function* leaves(path: string, owner: string, value: unknown): Generator<Value> {
    if (Array.isArray(value) && value.length) {
      for (const [place, member] of value.entries()) yield* leaves(`${path}[${place}]`, path, member);
    } else if (value !== null && typeof value === "object" && !Array.isArray(value)) {
      for (const [name, member] of Object.entries(value)) yield* leaves(path ? `${path}.${name}` : name, "", member);
    } else {
      const span = spans.get(path);
      const named = typeof value === "string" ? value : JSON.stringify(value);
      yield { path, value, span, score: span?.score ?? scores.get(`${path}.${named}`) ?? scores.get(`${owner}.${named}`) };
    }
  }
  return [...leaves("", "", data)];
}

const shown = (value: unknown): string =>
  value === null ? "not in the text" : Array.isArray(value) ? "none" : typeof value === "string" ? value : JSON.stringify(value);

export function Values({ values }: { values: Value[] }) {
  return (
    <>
      <h3>Values</h3>
      <Table label="Values" role="group" class="values" columns={["path", "value", { number: "score" }, "characters of the text"]}>
        {values.slice(0, MOST).map(({ path, value, score, span }) => (
          <tr>
            <th scope="row">{path}</th>
            <td class={value === null || Array.isArray(value) ? "wrap dim" : "wrap"}>{shown(value)}</td>
            <td class="number">{score?.toFixed(4) ?? ""}</td>
            <td>{span && span.start !== null ? `${span.start} to ${span.end}` : ""}</td>
          </tr>
        ))}
      </Table>
      {values.length > MOST && <p class="dim">{`and ${values.length - MOST} more`}</p>}
    </>
  );
}
