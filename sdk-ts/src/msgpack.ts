// MessagePack as SIE speaks it. The maps of arrays have byte strings as keys; here such a key is a text.

import { Decoder, Encoder, ExtensionCodec } from "@msgpack/msgpack";

const text = new TextDecoder("utf-8", { fatal: true });

/** Refuses what the library would write as an empty map, such as a Map. */
class Strict extends ExtensionCodec {
  override tryToEncode(value: unknown): null {
    const travels = Array.isArray(value) || value instanceof Uint8Array || (typeof value === "object" && isPlain(value!));
    if (!travels) throw new TypeError(`${Object.prototype.toString.call(value)} does not travel`);
    return null;
  }
}

const extensionCodec = new Strict();

/** An object without a class, also one of another frame of a page. */
export function isPlain(value: object): value is Record<string, unknown> {
  const prototype: unknown = Object.getPrototypeOf(value);
  return prototype === null || Object.getPrototypeOf(prototype) === null;
}

/** Throws an Error for what has no form in MessagePack. A member that is undefined is left out. */
export function encode(value: unknown): Uint8Array<ArrayBuffer> {
  // one encoder for each body: a shared one would keep the memory of the largest
  return new Encoder({ extensionCodec, ignoreUndefined: true, useBigInt64: true }).encodeSharedRef(value);
}

/** Byte strings are views of `bytes`. An integer of 64 bits is a bigint. Throws an Error. */
export function decode(bytes: Uint8Array): unknown {
  return new Decoder({ extensionCodec, useBigInt64: true, mapKeyConverter: key }).decode(bytes);
}

function key(value: unknown): string {
  return value instanceof Uint8Array ? text.decode(value) : String(value);
}
