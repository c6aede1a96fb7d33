import { Table } from "./table";
import type { Entity, ItemResult } from "./types";

const MAX_VALUES = 200;

interface Value {
  path: string;
  value: unknown;
  score?: number | undefined;
  span?: Entity | undefined;
}

/** Return the values of an item in the order of its data, with their scores and spans. The label of a span is the path of its
 * value; the label of a class is the path of its property and the value. */
export function valuesOf({ data = {}, entities = [], classifications = [] }: ItemResult): Value[] {
  const spans = new Map(entities.map((entity) => [entity.label, entity]));
  const scores = new Map(classifications.map(({ label, score }) => [label, score]));
  function* leaves(path: string, owner: string, value: unknown): Generator<Value> {
    if (Array.isArray(value) && value.length) {
      for (const [index, member] of value.entries()) yield* leaves(`${path}[${index}]`, path, member);
    } else if (value !== null && typeof value === "object" && !Array.isArray(value)) {
      for (const [name, member] of Object.entries(value)) yield* leaves(path ? `${path}.${name}` : name, "", member);
    } else {
      const span = spans.get(path);
      const text = typeof value === "string" ? value : JSON.stringify(value);
      yield { path, value, span, score: span?.score ?? scores.get(`${path}.${text}`) ?? scores.get(`${owner}.${text}`) };
    }
  }
  return [...leaves("", "", data)];
}

const valueText = (value: unknown): string =>
  value === null ? "not in the text" : Array.isArray(value) ? "none" : typeof value === "string" ? value : JSON.stringify(value);

/** The values that a model answers to a schema or to groups of labels, with their scores and spans. */
export function Values({ values }: { values: Value[] }) {
  return (
    <>
      <h3>Values</h3>
      <Table label="Values" role="group" class="values" columns={["path", "value", { number: "score" }, "characters of the text"]}>
        {values.slice(0, MAX_VALUES).map(({ path, value, score, span }) => (
          <tr>
            <th scope="row">{path}</th>
            <td class={value === null || Array.isArray(value) ? "wrap dim" : "wrap"}>{valueText(value)}</td>
            <td class="number">{score?.toFixed(4) ?? ""}</td>
            <td>{span && span.start !== null ? `${span.start} to ${span.end}` : ""}</td>
          </tr>
        ))}
      </Table>
      {values.length > MAX_VALUES && <p class="dim">{`and ${values.length - MAX_VALUES} more`}</p>}
    </>
  );
}
