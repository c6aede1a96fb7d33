// Stream of items: each part is sent when it is full, several at a time, and the results are in input order. Parts whose
// results were not read count as in flight, so a slow reader slows the source down.

import { abortError, sleep } from "./calls.js";
import { prepareItem } from "./items.js";
import type { Session } from "./options.js";
import { CONCURRENCY, type Part, PartBuilder, PartSender } from "./parts.js";
import type { Input } from "./types.js";
import { readResults, type Verb } from "./verbs.js";

const LINGER_MS = 20;

/**
 * Send the items of `source` in parts, and yield their results in input order. A part that is not full is sent after
 * `lingerMs` without another item. Throws SIEError, and the errors of `source`.
 */
export async function* stream<R>(
  verb: Verb<R>,
  model: string,
  source: Iterable<Input> | AsyncIterable<Input>,
  params: object | undefined,
  lingerMs: number | undefined,
  session: Session,
): AsyncGenerator<R, void, undefined> {
  const controller = new AbortController();
  const { signal } = session;
  const abort = () => controller.abort(signal?.reason);
  signal?.addEventListener("abort", abort, { once: true });
  const partSession = session.forCall({ signal: controller.signal });
  const sender = new PartSender(verb.name, model, "items", { params: params ?? {} }, partSession, 0);
  const inFlight: Promise<R[]>[] = [];
  const { concurrency = CONCURRENCY } = session.options;
  const inputs: Input[] = []; // inputs of the part that is being filled
  const sendPart = (part: Part) => {
    const partInputs = inputs.splice(0, part.items.length);
    const results = sender.sendOneOfSeveral(part).then((reply) => readResults(verb, reply, partInputs));
    results.catch(() => undefined); // the error is thrown when the results of this part are yielded
    inFlight.push(results);
  };
  const builder = new PartBuilder(partSession);
  const iterator = Symbol.asyncIterator in source ? source[Symbol.asyncIterator]() : source[Symbol.iterator]();
  let nextInput: Promise<IteratorResult<Input>> | undefined;
  let count = 0;
  let hasEnded = false;
  try {
    while (!hasEnded || inFlight.length) {
      if (signal?.aborted) throw abortError(signal);
      if (hasEnded || inFlight.length >= concurrency) {
        yield* await inFlight[0]!;
        inFlight.shift();
        continue;
      }
      nextInput ??= Promise.resolve(iterator.next());
      const event = await firstEvent(nextInput, inFlight[0], builder.isEmpty ? undefined : (lingerMs ?? LINGER_MS), signal);
      if (event === "linger") sendPart(builder.takePart());
      else if (event === "answer") {
        yield* await inFlight[0]!;
        inFlight.shift();
      } else {
        nextInput = undefined;
        if (event.done) {
          hasEnded = true;
          if (!builder.isEmpty) sendPart(builder.takePart());
          continue;
        }
        const item = await prepareItem(event.value, `items[${count++}]`);
        const fullPart = builder.add(item);
        if (fullPart) sendPart(fullPart);
        inputs.push(event.value);
      }
    }
  } finally {
    signal?.removeEventListener("abort", abort);
    controller.abort(signal?.reason);
    // no wait for a source that still works on its next item
    const closing = Promise.resolve(hasEnded ? undefined : iterator.return?.());
    closing.catch(() => undefined);
    if (!nextInput) await closing;
  }
}

/** Wait until the next input comes, the oldest part is answered, or `lingerMs` have passed; return which was first. */
async function firstEvent(
  nextInput: Promise<IteratorResult<Input>>,
  oldest: Promise<unknown> | undefined,
  lingerMs: number | undefined,
  signal: AbortSignal | undefined,
): Promise<IteratorResult<Input> | "answer" | "linger"> {
  const controller = new AbortController();
  const abort = () => controller.abort(signal?.reason);
  signal?.addEventListener("abort", abort, { once: true });
  const events: Promise<IteratorResult<Input> | "answer" | "linger">[] = [nextInput];
  if (oldest) events.push(oldest.then(() => "answer" as const));
  const linger = sleep(lingerMs ?? Infinity, controller.signal).then(() => "linger" as const);
  events.push(linger);
  linger.catch(() => undefined);
  try {
    return await Promise.race(events);
  } finally {
    signal?.removeEventListener("abort", abort);
    controller.abort();
  }
}
