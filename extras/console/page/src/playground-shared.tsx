/** Components and functions that several views of the playground share. */

import { useEffect, useState } from "preact/hooks";
import { SIEError } from "sie-client";
import { sendRequest } from "./api";
import type { Input } from "./playground-requests";
import { Table } from "./table";
import type { Reply } from "./types";
import { norm } from "./vectors";

/** An input of a request, and its name in the views. */
export interface NamedInput {
  name: string;
  input: Input;
}

/** Shorten a text to at most `most` characters. */
export const shorten = (text: string, most = 40): string => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Return the data URI of the first image of an input, empty if it has none. */
export function imageOf(input: Input | undefined): string {
  const image = input?.images?.[0];
  return typeof image === "string" ? image : (image?.data ?? "");
}

/** Return the step of a value on a scale from 0 to `steps`. */
export const scaleStep = (value: number, least: number, most: number, steps: number): number =>
  Math.max(0, Math.min(steps, Math.round((steps * (value - least)) / (most - least || 1))));

/** The reply to a POST, or its refusal. The request is sent again when it changes; an empty path sends none. */
export function useReply<T>(path: string, body: unknown): { value?: T; refusal?: string } {
  const [reply, setReply] = useState<{ value?: T; refusal?: string }>({});
  const text = JSON.stringify(body);
  useEffect(() => {
    let ended = false;
    setReply({});
    if (path) {
      sendRequest<T>({ method: "POST", path, body: JSON.parse(text) as unknown }).then(
        (value) => !ended && setReply({ value }),
        (error) => !ended && setReply({ refusal: error instanceof SIEError ? error.message : String(error) }),
      );
    }
    return () => {
      ended = true;
    };
  }, [path, text]);
  return reply;
}

interface Bar {
  name: string;
  value: number;
  title?: string;
  note?: string;
}

/** Bars over a range, by default from 0 or the least value to the largest value. */
export function Bars({ rows, least = Math.min(0, ...rows.map((row) => row.value)), most: maximum, label }: { rows: Bar[]; least?: number; most?: number; label: string }) {
  const most = maximum ?? Math.max(...rows.map((row) => row.value), least + 1e-9);
  const hasNotes = rows.some((row) => row.note);
  return (
    <table class="bars" aria-label={label}>
      <tbody>
        {rows.map(({ name, value, title, note }) => (
          <tr>
            <th scope="row" title={title ?? name}>{name}</th>
            <td><meter min={least} max={most} value={value} aria-label={name} /></td>
            <td class="number">{value.toFixed(4)}</td>
            {hasNotes && <td class="dim">{note}</td>}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** The tokens of each input, and the shape, norm and first values of its vectors. */
export function TokenTable({ reply, inputs }: { reply: Reply; inputs: NamedInput[] }) {
  const sortedScores = reply.scores && [...reply.scores].sort((a, b) => itemIndex(a.item_id) - itemIndex(b.item_id));
  const results = reply.items ?? sortedScores ?? [];
  const hasVectors = (reply.items ?? []).some((item) => item.dense || item.sparse || item.multivector);
  return (
    <details class="items" open={results.length <= 8}>
      <summary>Tokens{hasVectors ? " and vectors" : ""}</summary>
      <Table label="Tokens of each input" role="group" columns={["input", { number: "tokens" }, "truncated", ...(hasVectors ? ["shape", { number: "norm" }, "dtype", "first values"] : [])]}>
        {results.map((result, index) => (
          <tr>
            <th scope="row" title={inputs[index]?.name}>{`${index + 1} ${shorten(inputs[index]?.name ?? "", 28)}`}</th>
            <td class="number">{result.usage?.prompt_tokens ?? ""}</td>
            <td>{result.usage?.truncated ? <span class="warn">truncated</span> : "no"}</td>
            {hasVectors && vectorCells(reply.items?.[index]).map((cell, column) => <td class={column === 1 ? "number" : ""}>{cell}</td>)}
          </tr>
        ))}
      </Table>
    </details>
  );
}

/** Return the index of an input from the id that the gateway gave it. */
export const itemIndex = (id: string): number => Number(id.replace("item-", ""));

const firstValues = (values: number[]): string => values.slice(0, 4).map((value) => value.toFixed(4)).join(", ");

/** Return the shape, the norm, the data type and the first values of the vector of an item. */
function vectorCells(item: NonNullable<Reply["items"]>[number] | undefined): string[] {
  if (item?.dense) return [`${item.dense.values.length}`, norm(item.dense.values).toFixed(4), `${item.dense.dtype}${item.dense.source ? `, ${item.dense.source}` : ""}`, firstValues(item.dense.values)];
  if (item?.chunks) return [`${item.chunks.length} chunks`, "", item.chunks[0]?.dense?.dtype ?? "", ""];
  if (item?.sparse) return [`${item.sparse.indices.length} of ${item.sparse.dims}`, norm(item.sparse.values).toFixed(4), "float32", firstValues(item.sparse.values)];
  if (!item?.multivector) return ["", "", "", ""];
  const norms = item.multivector.values.map(norm);
  const [least, most] = [Math.min(...norms).toFixed(3), Math.max(...norms).toFixed(3)];
  return [`${item.multivector.num_tokens} × ${item.multivector.token_dims}`, least === most ? least : `${least} to ${most}`, item.multivector.dtype, firstValues(item.multivector.values[0] ?? [])];
}
