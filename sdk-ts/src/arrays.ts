// Arrays in MessagePack: maps of `nd`, `type`, `kind`, `shape` and `data`. Their bytes are in little-endian order, as in the
// typed arrays of all machines that run browsers or Node.

/** Numbers of a vector, in the type for `output_dtype`. float16 becomes float32, without a loss. */
export type Numbers = Float32Array | Float64Array | Int8Array | Uint8Array | Int16Array | Uint16Array | Int32Array | Uint32Array;

/** Array with any number of axes. `data` has it row after row. */
export interface Matrix<T extends Numbers = Numbers> {
  data: T;
  shape: number[];
}

type TypedArrayClass = new (buffer: ArrayBuffer) => Numbers;
/** Class and bytes of a number by the type on the wire. */
const TYPES = new Map<string, readonly [TypedArrayClass, number]>([
  ["<f4", [Float32Array, 4]],
  ["<f8", [Float64Array, 8]],
  ["<i4", [Int32Array, 4]],
  ["<u4", [Uint32Array, 4]],
  ["<i2", [Int16Array, 2]],
  ["<u2", [Uint16Array, 2]],
  ["|i1", [Int8Array, 1]],
  ["|u1", [Uint8Array, 1]],
]);

/** Replace the maps of arrays in `value` by arrays, at any depth. Copy byte strings, so that they do not hold the reply. */
export function unpackArrays(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(unpackArrays);
  if (value instanceof Uint8Array) return value.slice();
  if (typeof value !== "object" || value === null) return value;
  if (isArrayMap(value)) return readArray(value);
  return Object.fromEntries(Object.entries(value).map(([name, member]) => [name, unpackArrays(member)]));
}

function isArrayMap(value: object): boolean {
  return (value as { nd?: unknown }).nd === true && "data" in value && "shape" in value;
}

/** Read the map of an array. Throws TypeError for any other value. */
export function readArray(value: unknown): Matrix {
  const packed = value as { type?: unknown; shape?: unknown; data?: unknown };
  if (typeof value !== "object" || value === null || !isArrayMap(value)) throw new TypeError("expected an array");
  const { type, shape, data } = packed;
  if (typeof type !== "string" || !Array.isArray(shape) || !(data instanceof Uint8Array)) {
    throw new TypeError("array: expected type, shape and data");
  }
  const axes = shape.map(Number);
  const length = axes.reduce((product, axis) => product * axis, 1);
  const [arrayClass, numberBytes] = type === "<f2" ? [undefined, 2] : (TYPES.get(type) ?? [undefined, 0]);
  if (!numberBytes) throw new TypeError(`array: unknown type ${type}`);
  if (axes.some((axis) => axis < 0) || data.length !== length * numberBytes) {
    throw new TypeError(`array: ${data.length} bytes do not make the shape ${axes.join(",")} of ${type}`);
  }
  // copied, because a typed array needs an aligned address
  const { buffer } = new Uint8Array(data);
  return { data: arrayClass ? new arrayClass(buffer) : widenHalves(new Uint16Array(buffer)), shape: axes };
}

/** Read the map of an array with one axis. Throws TypeError for any other value. */
export function readVector(value: unknown): Numbers {
  const { data, shape } = readArray(value);
  if (shape.length !== 1) throw new TypeError(`array: expected one axis, got ${shape.length}`);
  return data;
}

/** Convert float16 to float32. */
function widenHalves(halves: Uint16Array): Float32Array {
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

/** Convert the vectors of tokens to the map of an array. Throws TypeError for a value that is no matrix. */
export function packMatrix(value: unknown): Record<string, unknown> {
  const { data, shape } = Array.isArray(value) ? joinRows(value) : (value as Matrix);
  const isMatrix =
    Array.isArray(shape) && shape.length === 2 && ArrayBuffer.isView(data) && data.length === shape[0]! * shape[1]!;
  if (!isMatrix) throw new TypeError("expected rows of numbers, or data and a shape [tokens, width]");
  const floats = data instanceof Float32Array ? data : Float32Array.from(data);
  const bytes = new Uint8Array(floats.buffer, floats.byteOffset, floats.byteLength);
  return { nd: true, type: "<f4", kind: "", shape, data: bytes };
}

function joinRows(rows: unknown[]): Matrix {
  const width = (rows[0] as ArrayLike<number> | undefined)?.length ?? 0;
  const data = new Float32Array(rows.length * width);
  rows.forEach((row, index) => {
    const numbers = row as ArrayLike<number> | null;
    if (typeof numbers !== "object" || numbers === null || numbers.length !== width) {
      throw new TypeError(`row ${index}: expected ${width} numbers`);
    }
    data.set(numbers, index * width);
  });
  if (data.some((number) => !Number.isFinite(number))) throw new TypeError("expected finite numbers of float32");
  return { data, shape: [rows.length, width] };
}

