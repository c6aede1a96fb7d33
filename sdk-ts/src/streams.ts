// A stream of items: parts are sent as they fill, so many in flight, and their results come in order. What the reader
// has not taken counts as in flight, so a slow reader holds the source up.

import { aborted, sleep } from "./calls.js";
import { item } from "./items.js";
import type { Session } from "./options.js";
import { CONCURRENCY, Filling, type Part, Request } from "./parts.js";
import type { Input } from "./types.js";
import { results, type Verb } from "./verbs.js";

const LINGER_MS = 20;

export async function* stream<R>(
  verb: Verb<R>,
  model: string,
  source: Iterable<Input> | AsyncIterable<Input>,
  params: object | undefined,
  lingerMs: number | undefined,
  session: Session,
): AsyncGenerator<R, void, undefined> {
  const ends = new AbortController();
  const outer = session.signal;
  const end = () => ends.abort(outer?.reason);
  outer?.addEventListener("abort", end, { once: true });
  const own = session.forCall({ signal: ends.signal });
  const request = new Request(verb.name, model, "items", { params: params ?? {} }, own, 0);
  const flying: Promise<R[]>[] = [];
  const most = session.options.concurrency ?? CONCURRENCY;
  const items: Input[] = []; // of the part that fills
  const start = (part: Part) => {
    const inputs = items.splice(0, part.items.length);
    const pending = request.ask(part).then((reply) => results(verb, reply, inputs));
    pending.catch(() => undefined); // it is thrown when its turn comes
    flying.push(pending);
  };
  const filling = new Filling(own);
  const iterator = Symbol.asyncIterator in source ? source[Symbol.asyncIterator]() : source[Symbol.iterator]();
  let coming: Promise<IteratorResult<Input>> | undefined;
  let count = 0;
  let isOver = false;
  try {
    while (!isOver || flying.length) {
      if (outer?.aborted) throw aborted(outer);
      if (isOver || flying.length >= most) {
        yield* await flying[0]!;
        flying.shift();
        continue;
      }
      coming ??= Promise.resolve(iterator.next());
      const event = await first(coming, flying[0], filling.isEmpty ? undefined : (lingerMs ?? LINGER_MS), outer);
      if (event === "linger") start(filling.take());
      else if (event === "answer") {
        yield* await flying[0]!;
        flying.shift();
      } else {
        coming = undefined;
        if (event.done) {
          isOver = true;
          if (!filling.isEmpty) start(filling.take());
          continue;
        }
        const sent = await item(event.value, `items[${count++}]`);
        const full = filling.add(sent);
        if (full) start(full);
        items.push(event.value);
      }
    }
  } finally {
    outer?.removeEventListener("abort", end);
    ends.abort(outer?.reason);
    // a source that still works on its next item is not waited for
    const returned = Promise.resolve(isOver ? undefined : iterator.return?.());
    returned.catch(() => undefined);
    if (!coming) await returned;
  }
}

/** What happens first: the next input, an answer to the oldest part, or a part has waited long enough. */
async function first(
  coming: Promise<IteratorResult<Input>>,
  oldest: Promise<unknown> | undefined,
  lingerMs: number | undefined,
  signal: AbortSignal | undefined,
): Promise<IteratorResult<Input> | "answer" | "linger"> {
  const stop = new AbortController();
  const end = () => stop.abort(signal?.reason);
  signal?.addEventListener("abort", end, { once: true });
  const events: Promise<IteratorResult<Input> | "answer" | "linger">[] = [coming];
  if (oldest) events.push(oldest.then(() => "answer" as const));
  const linger = sleep(lingerMs ?? Infinity, stop.signal).then(() => "linger" as const);
  events.push(linger);
  linger.catch(() => undefined);
  try {
    return await Promise.race(events);
  } finally {
    signal?.removeEventListener("abort", end);
    stop.abort();
  }
}
