// MessagePack in the form of SIE: maps of arrays may have byte strings as keys, which become strings here.

import { Decoder, Encoder, ExtensionCodec } from "@msgpack/msgpack";

const utf8 = new TextDecoder("utf-8", { fatal: true });

const SURROGATE = /\p{Cs}/u; // half of a pair

/** Codec that refuses values which the library would write as an empty map, such as a Map, cut to 64 bits, or write as invalid UTF-8. */
class StrictCodec extends ExtensionCodec {
  override tryToEncode(value: unknown): null {
    const isEncodable = Array.isArray(value) || value instanceof Uint8Array || (typeof value === "object" && isPlain(value!));
    if (!isEncodable) throw new TypeError(`${Object.prototype.toString.call(value)} has no form in MessagePack`);
    for (const member of value instanceof Uint8Array ? [] : Array.isArray(value) ? value : Object.entries(value).flat()) {
      if (typeof member === "string" && SURROGATE.test(member)) {
        throw new TypeError(`${JSON.stringify(member).slice(0, 80)} has half of a surrogate pair, which UTF-8 cannot hold`);
      }
      if (typeof member === "bigint" && BigInt.asIntN(64, member) !== member && BigInt.asUintN(64, member) !== member) {
        throw new TypeError(`${member} has more than 64 bits`);
      }
    }
    return null;
  }
}

const extensionCodec = new StrictCodec();

/** Return true for an object without a class, also if it comes from another frame of the page. */
export function isPlain(value: object): value is Record<string, unknown> {
  const prototype: unknown = Object.getPrototypeOf(value);
  return prototype === null || Object.getPrototypeOf(prototype) === null;
}

/** Encode a value, without its undefined members. Throws an Error for a value that has no form in MessagePack. */
export function encode(value: unknown): Uint8Array<ArrayBuffer> {
  // one encoder for each body: a shared one would keep memory for the largest body
  return new Encoder({ extensionCodec, ignoreUndefined: true, useBigInt64: true }).encodeSharedRef(value);
}

/** Decode `bytes`. Byte strings are views of it, and integers that a number cannot hold are bigints. Throws an Error. */
export function decode(bytes: Uint8Array): unknown {
  return narrow(new Decoder({ extensionCodec, useBigInt64: true, mapKeyConverter: decodeKey }).decode(bytes));
}

/** Replace the bigints that a number holds by numbers, at any depth: the decoder makes a bigint of each integer of 64 bits. */
function narrow(value: unknown): unknown {
  if (typeof value === "bigint") return Number.isSafeInteger(Number(value)) ? Number(value) : value;
  if (typeof value === "object" && value !== null && !(value instanceof Uint8Array)) {
    for (const [name, member] of Object.entries(value)) (value as Record<string, unknown>)[name] = narrow(member);
  }
  return value;
}

function decodeKey(value: unknown): string {
  return value instanceof Uint8Array ? utf8.decode(value) : String(value);
}
