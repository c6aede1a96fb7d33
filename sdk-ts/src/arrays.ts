// Arrays on the wire: maps of `nd`, `type`, `kind`, `shape` and `data`, in little-endian order, which is that of every
// machine that runs a browser or Node today, as typed arrays have it.

/** The numbers of a vector, in the type that `output_dtype` asked for. float16 is widened, which is exact. */
export type Numbers = Float32Array | Float64Array | Int8Array | Uint8Array | Int16Array | Uint16Array | Int32Array | Uint32Array;

/** An array of any number of axes, row after row in `data`. */
export interface Matrix<T extends Numbers = Numbers> {
  data: T;
  shape: number[];
}

type Kind = new (buffer: ArrayBuffer) => Numbers;
const KINDS: Readonly<Record<string, readonly [Kind, number]>> = {
  "<f4": [Float32Array, 4],
  "<f8": [Float64Array, 8],
  "<i4": [Int32Array, 4],
  "<u4": [Uint32Array, 4],
  "<i2": [Int16Array, 2],
  "<u2": [Uint16Array, 2],
  "|i1": [Int8Array, 1],
  "|u1": [Uint8Array, 1],
};

/** A value with arrays in place of their maps, at any depth; byte strings are copied out of the reply. */
export function unpack(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(unpack);
  if (value instanceof Uint8Array) return value.slice();
  if (typeof value !== "object" || value === null) return value;
  if (isArrayMap(value)) return matrix(value);
  return Object.fromEntries(Object.entries(value).map(([name, member]) => [name, unpack(member)]));
}

function isArrayMap(value: object): boolean {
  return (value as { nd?: unknown }).nd === true && "data" in value && "shape" in value;
}

/** The array of its map. Throws TypeError for a map that is none. */
export function matrix(value: unknown): Matrix {
  const packed = value as { type?: unknown; shape?: unknown; data?: unknown };
  if (typeof value !== "object" || value === null || !isArrayMap(value)) throw new TypeError("expected an array");
  const { type, shape, data } = packed;
  if (typeof type !== "string" || !Array.isArray(shape) || !(data instanceof Uint8Array)) {
    throw new TypeError("array: expected type, shape and data");
  }
  const axes = shape.map(Number);
  const length = axes.reduce((product, axis) => product * axis, 1);
  const [kind, width] = type === "<f2" ? [undefined, 2] : (KINDS[type] ?? [undefined, 0]);
  if (!width) throw new TypeError(`array: the type ${type} is not known`);
  if (data.length !== length * width) {
    throw new TypeError(`array: ${data.length} bytes do not make the shape ${axes.join(",")} of ${type}`);
  }
  // the one copy, which puts it on an address of its own, where its type belongs
  const own = new Uint8Array(data).buffer;
  return { data: kind ? new kind(own) : widened(new Uint16Array(own)), shape: axes };
}

/** The vector of its map. */
export function vector(value: unknown): Numbers {
  const rows = matrix(value);
  if (rows.shape.length !== 1) throw new TypeError(`array: expected one axis, got ${rows.shape.length}`);
  return rows.data;
}

/** float16 as float32. */
function widened(halves: Uint16Array): Float32Array {
  const floats = new Float32Array(halves.length);
  halves.forEach((half, index) => {
    const exponent = (half >> 10) & 0x1f;
    const fraction = half & 0x3ff;
    const size =
      exponent === 0 ? fraction * 2 ** -24
      : exponent < 31 ? (1 + fraction / 1024) * 2 ** (exponent - 15)
      : fraction ? NaN : Infinity;
    floats[index] = half & 0x8000 ? -size : size;
  });
  return floats;
}

/** The map of a matrix of tokens, as a request has it. Throws TypeError for what is none. */
export function packedMatrix(value: unknown): Record<string, unknown> {
  const { data, shape } = Array.isArray(value) ? ofRows(value) : (value as Matrix);
  const isMatrix =
    Array.isArray(shape) && shape.length === 2 && ArrayBuffer.isView(data) && data.length === shape[0]! * shape[1]!;
  if (!isMatrix) throw new TypeError("expected rows of numbers, or data and a shape [tokens, width]");
  const floats = data instanceof Float32Array ? data : Float32Array.from(data);
  const bytes = new Uint8Array(floats.buffer, floats.byteOffset, floats.byteLength);
  return { nd: true, type: "<f4", kind: "", shape, data: bytes };
}

function ofRows(rows: unknown[]): Matrix {
  const width = (rows[0] as ArrayLike<number> | undefined)?.length ?? 0;
  const data = new Float32Array(rows.length * width);
  rows.forEach((row, index) => {
    const numbers = row as ArrayLike<number> | null;
    if (typeof numbers !== "object" || numbers === null || numbers.length !== width) {
      throw new TypeError(`expected rows of ${width} numbers, got another one at ${index}`);
    }
    data.set(numbers, index * width);
  });
  if (data.some((number) => !Number.isFinite(number))) throw new TypeError("expected finite numbers of float32");
  return { data, shape: [rows.length, width] };
}

