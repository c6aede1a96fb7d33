/** Parts that several views of the playground share. */

import { useEffect, useState } from "preact/hooks";
import { SIEError } from "sie-client";
import { sendRequest } from "./api";
import type { Input } from "./playground-requests";
import { Table } from "./table";
import type { Reply } from "./types";
import { norm } from "./vectors";

/** An input as it was sent, by the name that views call it. */
export interface NamedInput {
  name: string;
  input: Input;
}

export const shorten = (text: string, most = 40): string => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** The image of an input, empty if it has none. */
export function imageOf(input: Input | undefined): string {
  const image = input?.images?.[0];
  return typeof image === "string" ? image : (image?.data ?? "");
}

/** The step of a scale of `steps` that a value is at. */
export const scaleStep = (value: number, least: number, most: number, steps: number): number =>
  Math.max(0, Math.min(steps, Math.round((steps * (value - least)) / (most - least || 1))));

export type ReplyState<T> = { value?: T; refusal?: string };

/** What the gateway answers to a request, asked again when it changes; nothing is asked for an empty path. */
export function useReply<T>(path: string, body: unknown): ReplyState<T> {
  const [reply, setReply] = useState<ReplyState<T>>({});
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

export interface Bar {
  name: string;
  value: number;
  title?: string;
  note?: string;
}

/** Bars over a range, which is that of the values where none is given. */
export function Bars({ rows, least = Math.min(0, ...rows.map((row) => row.value)), most: highest, label }: { rows: Bar[]; least?: number; most?: number; label: string }) {
  const most = highest ?? Math.max(...rows.map((row) => row.value), least + 1e-9);
  const noted = rows.some((row) => row.note);
  return (
    <table class="bars" aria-label={label}>
      <tbody>
        {rows.map(({ name, value, title, note }) => (
          <tr>
            <th scope="row" title={title ?? name}>{name}</th>
            <td><meter min={least} max={most} value={value} aria-label={name} /></td>
            <td class="number">{value.toFixed(4)}</td>
            {noted && <td class="dim">{note}</td>}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** Tokens, and of vectors how many numbers they have and how long they are, one row for each input. */
export function TokenTable({ reply, inputs }: { reply: Reply; inputs: NamedInput[] }) {
  const ofScores = reply.scores && [...reply.scores].sort((a, b) => itemIndex(a.item_id) - itemIndex(b.item_id));
  const slots = reply.items ?? ofScores ?? [];
  const vectors = (reply.items ?? []).some((item) => item.dense || item.sparse || item.multivector);
  return (
    <details class="items" open={slots.length <= 8}>
      <summary>Tokens{vectors ? " and vectors" : ""}</summary>
      <Table label="Tokens of each input" role="group" columns={["input", { number: "tokens" }, "truncated", ...(vectors ? ["shape", { number: "norm" }, "dtype", "first values"] : [])]}>
        {slots.map((slot, place) => (
          <tr>
            <th scope="row" title={inputs[place]?.name}>{`${place + 1} ${shorten(inputs[place]?.name ?? "", 28)}`}</th>
            <td class="number">{slot.usage?.prompt_tokens ?? ""}</td>
            <td>{slot.usage?.truncated ? <span class="warn">truncated</span> : "no"}</td>
            {vectors && shape(reply.items?.[place]).map((cell, column) => <td class={column === 1 ? "number" : ""}>{cell}</td>)}
          </tr>
        ))}
      </Table>
    </details>
  );
}

export const itemIndex = (id: string): number => Number(id.replace("item-", ""));

const first = (values: number[]): string => values.slice(0, 4).map((value) => value.toFixed(4)).join(", ");

function shape(item: NonNullable<Reply["items"]>[number] | undefined): string[] {
  if (item?.dense) return [`${item.dense.values.length}`, norm(item.dense.values).toFixed(4), `${item.dense.dtype}${item.dense.source ? `, ${item.dense.source}` : ""}`, first(item.dense.values)];
  if (item?.chunks) return [`${item.chunks.length} chunks`, "", item.chunks[0]?.dense?.dtype ?? "", ""];
  if (item?.sparse) return [`${item.sparse.indices.length} of ${item.sparse.dims}`, norm(item.sparse.values).toFixed(4), "float32", first(item.sparse.values)];
  if (!item?.multivector) return ["", "", "", ""];
  const norms = item.multivector.values.map(norm);
  const [least, most] = [Math.min(...norms).toFixed(3), Math.max(...norms).toFixed(3)];
  return [`${item.multivector.num_tokens} × ${item.multivector.token_dims}`, least === most ? least : `${least} to ${most}`, item.multivector.dtype, first(item.multivector.values[0] ?? [])];
}
