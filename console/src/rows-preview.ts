/** The first rows of a file that a job is to read, and its columns. */

export interface Preview {
  columns: string[];
  /** The first rows, cell by cell; none of a file whose rows only the server reads. */
  rows: string[][];
  /** How many rows there are, undefined where only the server counts them. */
  count?: number;
}

const READ = 1 << 16; // bytes of the beginning
const ROWS = 3;
const FOOTER = 8; // bytes at the end of a Parquet file: the length of its metadata, and its mark
const MOST_METADATA = 1 << 24;

/** Throws Error, with what is wrong with the file. */
export async function preview(file: File): Promise<Preview> {
  const kind = file.name.split(".").at(-1)?.toLowerCase();
  if (kind === "parquet") return ofParquet(file);
  const text = await file.slice(0, READ).text();
  return kind === "csv" ? ofCsv(text) : ofLines(text, file.size <= READ);
}

const cell = (value: unknown): string => (value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));

function ofLines(text: string, isWhole: boolean): Preview {
  const lines = text.split("\n").filter((line) => line.trim());
  const whole = isWhole || lines.length < 2 ? lines : lines.slice(0, -1); // the last one may be cut
  const rows = whole.slice(0, ROWS).map((line, place) => {
    try {
      const value: unknown = JSON.parse(line);
      if (value !== null && typeof value === "object" && !Array.isArray(value)) return value as Record<string, unknown>;
    } catch {
      // told below
    }
    throw new Error(`Line ${place + 1} is no JSON map.`);
  });
  const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  return { columns, rows: rows.map((row) => columns.map((name) => cell(row[name]))), ...(isWhole ? { count: lines.length } : {}) };
}

function ofCsv(text: string): Preview {
  const rows: string[][] = [[]];
  const pattern = /"((?:[^"]|"")*)"|([^,\r\n"]*)/y;
  for (let at = 0; at < text.length && rows.length <= ROWS + 1; ) {
    pattern.lastIndex = at;
    const [match = "", quoted, plain = ""] = pattern.exec(text) ?? [];
    rows.at(-1)?.push(quoted?.replaceAll('""', '"') ?? plain);
    at += match.length;
    const end = /\r?\n|,/y;
    end.lastIndex = at;
    const [mark = " "] = end.exec(text) ?? [];
    if (mark.endsWith("\n") && at + mark.length < text.length) rows.push([]);
    at += mark.length;
  }
  const [columns = [], ...rest] = rows;
  return { columns, rows: rest.slice(0, ROWS) };
}

async function ofParquet(file: File): Promise<Preview> {
  const end = new DataView(await file.slice(-FOOTER).arrayBuffer());
  const isParquet = end.byteLength === FOOTER && end.getUint32(4) === 0x50415231; // PAR1
  const length = isParquet ? end.getUint32(0, true) : 0;
  if (!length || length > Math.min(file.size, MOST_METADATA)) throw new Error("This is no Parquet file.");
  const metadata = compact(new DataView(await file.slice(file.size - FOOTER - length, file.size - FOOTER).arrayBuffer()));
  const [root, ...elements] = (metadata.get(2) ?? []) as Fields[];
  const columns: string[] = [];
  /** Elements of the tree that begins at a place, which are written one after another. */
  const size = (place: number): number => {
    let all = 1;
    for (let child = 0; child < Number(elements[place]?.get(5) ?? 0) && place + all < elements.length; child++) all += size(place + all);
    return all;
  };
  for (let place = 0; place < elements.length && columns.length < Number(root?.get(5) ?? 0); place += size(place)) {
    columns.push(String(elements[place]?.get(4) ?? ""));
  }
  return { columns, rows: [], count: Number(metadata.get(3) ?? 0) };
}

type Fields = Map<number, unknown>;

/** A struct of Thrift's compact protocol, by the numbers of its fields. */
function compact(view: DataView): Fields {
  let at = 0;
  const byte = () => view.getUint8(at++);
  const varint = (): number => {
    let [value, factor] = [0, 1];
    for (;;) {
      const next = byte();
      value += (next & 127) * factor;
      if (next < 128) return value;
      factor *= 128;
    }
  };
  const zigzag = (): number => {
    const value = varint();
    return value % 2 ? -(value + 1) / 2 : value / 2;
  };
  const text = (): string => {
    const length = varint();
    at += length;
    return new TextDecoder().decode(new Uint8Array(view.buffer, at - length, length));
  };
  const read = (kind: number): unknown => {
    if (kind === 3) return byte();
    if (kind <= 6) return zigzag();
    if (kind === 7) return view.getFloat64((at += 8) - 8, true);
    if (kind === 8) return text();
    if (kind === 12) return struct();
    if (kind > 10) throw new Error("This Parquet file has metadata that the page cannot read.");
    const head = byte();
    const count = head >> 4 === 15 ? varint() : head >> 4;
    return Array.from({ length: count }, () => ((head & 15) < 3 ? byte() : read(head & 15)));
  };
  function struct(): Fields {
    const fields: Fields = new Map();
    for (let number = 0; ; ) {
      const head = byte();
      if (head === 0) return fields;
      number = head >> 4 ? number + (head >> 4) : zigzag();
      const kind = head & 15;
      fields.set(number, kind < 3 ? kind === 1 : read(kind));
    }
  }
  return struct();
}
