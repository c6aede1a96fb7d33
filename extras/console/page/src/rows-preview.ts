/** A preview of the input file of a job: its columns and first rows. */

import { formatValue } from "./format";

export interface Preview {
  columns: string[];
  /** The cells of the first rows; empty for Parquet, whose rows only the server reads. */
  rows: string[][];
  /** The number of rows, undefined if only the server counts them. */
  count?: number;
  /** True if the first row is too long to be shown. */
  isTooLong?: boolean;
}

const MAX_BYTES = 1 << 16; // of CSV and JSON Lines
const MAX_ROW_BYTES = 1 << 22; // of JSON Lines whose first row has more than MAX_BYTES
const MAX_ROWS = 3;
const FOOTER_BYTES = 8; // of a Parquet file: the length of its metadata, and its magic number
const MAX_METADATA_BYTES = 1 << 24;

/** Return the preview of a file. Throws Error with the fault of a file that cannot be read. */
export async function preview(file: File): Promise<Preview> {
  const kind = file.name.split(".").at(-1)?.toLowerCase();
  if (kind === "parquet") return previewParquet(file);
  if (kind === "csv") return previewCsv(await file.slice(0, MAX_BYTES).text());
  return (await previewJsonLines(file, MAX_BYTES)) ?? (await previewJsonLines(file, MAX_ROW_BYTES)) ?? { columns: [], rows: [], isTooLong: true };
}

/** Return the preview of JSON Lines, undefined if the first row does not end within `maxBytes`. */
async function previewJsonLines(file: File, maxBytes: number): Promise<Preview | undefined> {
  const lines = (await file.slice(0, maxBytes).text()).split("\n").filter((line) => line.trim());
  const isComplete = file.size <= maxBytes;
  if (!isComplete && lines.length < 2) return undefined;
  const complete = isComplete ? lines : lines.slice(0, -1); // the last line may be cut
  const rows = complete.slice(0, MAX_ROWS).map((line, index) => {
    try {
      const value: unknown = JSON.parse(line);
      if (value !== null && typeof value === "object" && !Array.isArray(value)) return value as Record<string, unknown>;
    } catch {
      // the error below names the line
    }
    throw new Error(`Line ${index + 1} is no JSON map.`);
  });
  const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  return { columns, rows: rows.map((row) => columns.map((name) => (Object.hasOwn(row, name) ? formatValue(row[name]) : ""))), ...(isComplete ? { count: lines.length } : {}) };
}

function previewCsv(text: string): Preview {
  const rows: string[][] = [[]];
  const pattern = /"((?:[^"]|"")*)"|([^,\r\n"]*)/y;
  for (let at = 0; at < text.length && rows.length <= MAX_ROWS + 1; ) {
    pattern.lastIndex = at;
    const [match = "", quoted, plain = ""] = pattern.exec(text) ?? [];
    rows.at(-1)?.push(quoted?.replaceAll('""', '"') ?? plain);
    at += match.length;
    const separators = /\r?\n|,/y;
    separators.lastIndex = at;
    const [separator = " "] = separators.exec(text) ?? [];
    if (separator.endsWith("\n") && at + separator.length < text.length) rows.push([]);
    at += separator.length;
  }
  const [columns = [], ...rest] = rows;
  return { columns, rows: rest.slice(0, MAX_ROWS) };
}

async function previewParquet(file: File): Promise<Preview> {
  const footer = new DataView(await file.slice(-FOOTER_BYTES).arrayBuffer());
  const isParquet = footer.byteLength === FOOTER_BYTES && footer.getUint32(4) === 0x50415231; // PAR1
  const length = isParquet ? footer.getUint32(0, true) : 0;
  if (!length || length > Math.min(file.size, MAX_METADATA_BYTES)) throw new Error("This is no Parquet file.");
  const metadata = parseThrift(new DataView(await file.slice(file.size - FOOTER_BYTES - length, file.size - FOOTER_BYTES).arrayBuffer()));
  const [root, ...elements] = (metadata.get(2) ?? []) as Fields[];
  const columns: string[] = [];
  /** Return the number of elements of a subtree of the schema, which lie one after another from `start`. */
  const subtreeSize = (start: number): number => {
    let count = 1;
    for (let child = 0; child < Number(elements[start]?.get(5) ?? 0) && start + count < elements.length; child++) count += subtreeSize(start + count);
    return count;
  };
  for (let start = 0; start < elements.length && columns.length < Number(root?.get(5) ?? 0); start += subtreeSize(start)) {
    columns.push(String(elements[start]?.get(4) ?? ""));
  }
  return { columns, rows: [], count: Number(metadata.get(3) ?? 0) };
}

type Fields = Map<number, unknown>; // values by the number of their field

/** Parse a struct in the compact protocol of Thrift. */
function parseThrift(view: DataView): Fields {
  let at = 0;
  const readByte = () => view.getUint8(at++);
  const readVarint = (): number => {
    let [value, factor] = [0, 1];
    for (;;) {
      const next = readByte();
      value += (next & 127) * factor;
      if (next < 128) return value;
      factor *= 128;
    }
  };
  const readZigzag = (): number => {
    const value = readVarint();
    return value % 2 ? -(value + 1) / 2 : value / 2;
  };
  const readText = (): string => {
    const length = readVarint();
    at += length;
    return new TextDecoder().decode(new Uint8Array(view.buffer, at - length, length));
  };
  const readValue = (kind: number): unknown => {
    if (kind === 3) return readByte();
    if (kind <= 6) return readZigzag();
    if (kind === 7) return view.getFloat64((at += 8) - 8, true);
    if (kind === 8) return readText();
    if (kind === 12) return readStruct();
    if (kind > 10) throw new Error("This Parquet file has metadata that the page cannot read.");
    const head = readByte();
    const count = head >> 4 === 15 ? readVarint() : head >> 4;
    return Array.from({ length: count }, () => ((head & 15) < 3 ? readByte() : readValue(head & 15)));
  };
  function readStruct(): Fields {
    const fields: Fields = new Map();
    for (let number = 0; ; ) {
      const head = readByte();
      if (head === 0) return fields;
      number = head >> 4 ? number + (head >> 4) : readZigzag();
      const kind = head & 15;
      fields.set(number, kind < 3 ? kind === 1 : readValue(kind));
    }
  }
  return readStruct();
}
