// Test cases against a real server, in Node and in a browser. A case throws if an expectation fails.

import {
  type ClientOptions, ContentConflictError, InvalidInputError, ModelNotFoundError, NotFoundError, ServerError,
  SIEAbortError, SIEClient, SIEConnectionError, restore, SIEError, type StandardSchema, type WebSocketClass,
} from "../src/index.js";
import { readArray } from "../src/arrays.js";
import { decode, encode } from "../src/msgpack.js";

const MINI = "test/mini";
const TEXTS = ["a cat", "a longer text about kittens and other small animals", "a tax form"];

function check(condition: unknown, message: string): asserts condition {
  if (!condition) throw new Error(message);
}

function equal(actual: unknown, expected: unknown, message = ""): void {
  const [actualJson, expectedJson] = [JSON.stringify(actual), JSON.stringify(expected)];
  check(actualJson === expectedJson, `${message}: ${actualJson} is not ${expectedJson}`);
}

function near(actual: ArrayLike<number>, expected: ArrayLike<number>, tolerance = 1e-6): void {
  equal(actual.length, expected.length, "length");
  for (let place = 0; place < actual.length; place++) {
    const difference = Math.abs(actual[place]! - expected[place]!);
    check(difference <= tolerance, `[${place}]: ${actual[place]} is not ${expected[place]}`);
  }
}

async function catchError(promise: Promise<unknown>): Promise<unknown> {
  return promise.then(
    () => check(false, "nothing was thrown"),
    (error: unknown) => error,
  );
}

/** Return the cases by name. `options`: those of a client of the server. */
export function suite(options: ClientOptions): Record<string, () => Promise<void>> {
  const client = new SIEClient(options);

  /** Send a request without the client, and return the JSON of the reply. */
  async function postJson(path: string, body: unknown): Promise<any> {
    const headers = { "content-type": "application/json", accept: "application/json" };
    const answer = await fetch(`${String(options.baseUrl)}${path}`, { method: "POST", headers, body: JSON.stringify(body) });
    check(answer.ok, `${path}: ${answer.status}`);
    return answer.json();
  }

  return {
    async "vectors are equal to those in JSON, and results have usage and timing"() {
      const results = await client.encode(MINI, TEXTS);
      const expected = (await postJson(`/v1/encode/${MINI}`, { items: TEXTS })).items;
      results.forEach((result, place) => near(result.dense!, expected[place].dense.values, 1e-3));
      check(results.usage.totalTokens > 0, "usage");
      const { timing, requestId, model } = results[0]!;
      for (const stage of ["queueMs", "inferenceMs", "totalMs"] as const) check(timing[stage] >= 0, stage);
      check(timing.totalMs >= timing.inferenceMs, "the whole is more than a part");
      check(requestId.length > 10, "request id");
      equal(model, MINI);
      const single = await client.encode(MINI, { id: "mine", text: TEXTS[0] });
      const length = Array.from(TEXTS[0]!).length;
      const chunked = await client.encode(MINI, { text: TEXTS[0]!, chunks: [[0, length]] });
      equal(chunked.chunks!.map(({ start, end }) => [start, end]), [[0, length]]);
      near(chunked.chunks![0]!.dense!, single.dense!, 1e-5);
      equal(chunked.chunks![0]!.outputs.dense!.dims, single.outputs.dense!.dims);
      equal(single.id, "mine");
      near(single.dense!, results[0]!.dense!, 1e-3);
    },

    async "each output dtype becomes the right typed array"() {
      const [plain] = await client.encode(MINI, [TEXTS[0]!]);
      const [half] = await client.encode(MINI, [TEXTS[0]!], { params: { output_dtype: "float16" } });
      near(half!.dense!, plain!.dense!, 2e-3);
      const [bytes] = await client.encode(MINI, [TEXTS[0]!], { params: { output_dtype: "int8" } });
      check(bytes!.dense instanceof Int8Array, "int8");
      const [bits] = await client.encode(MINI, [TEXTS[0]!], { params: { output_dtype: "binary" } });
      equal(bits!.dense!.length * 8, plain!.dense!.length);
    },

    async "sparse and late-interaction vectors have their shapes"() {
      const params = { output_types: ["dense", "sparse", "multivector"] as ("dense" | "sparse" | "multivector")[] };
      const result = await client.encode("test/m3", "hello world", { params });
      const expected = (await postJson("/v1/encode/test/m3", { items: ["hello world"], params })).items[0];
      equal([...result.sparse!.indices], expected.sparse.indices);
      near(result.sparse!.values, expected.sparse.values, 1e-3);
      const { data, shape } = result.multivector!;
      equal(shape[0], expected.multivector.values.length);
      near(data.slice(0, shape[1]), expected.multivector.values[0], 1e-3);
    },

    async "documents are ranked"() {
      const documents = ["queue", "river search", "kernel"];
      const result = await client.score("test/cross", "river search", documents);
      const expected = (await postJson("/v1/score/test/cross", { query: "river search", items: documents })).scores;
      equal(result.scores.map((entry) => entry.itemId), expected.map((entry: { item_id: string }) => entry.item_id));
      near(result.scores.map((entry) => entry.score!), expected.map((entry: { score: number }) => entry.score), 1e-3);
      equal(result.scores.map((entry) => entry.rank), [0, 1, 2]);
    },

    async "the positions of spans are their positions in the text"() {
      const text = "Ada met Charles in 東京 🗼 today.";
      const result = await client.extract("test/gliner", text, { params: { labels: ["person", "place"], threshold: 0.3 } });
      const characters = [...text]; // positions count code points
      for (const span of result.entities) equal(characters.slice(span.start!, span.end!).join(""), span.text);
      check(result.entities.length > 0, "spans");
    },

    async "values have the types of their schema, and a value that is missing is named"() {
      const text = "search engine queue worker stream index vector river mountain at 12 o'clock.";
      const mood = { enum: ["calm", "very angry"] } as const;
      const line = { type: "object", properties: { product: { type: "string" } }, required: ["product"] } as const;
      const schema = {
        type: "object",
        properties: { mood, isLate: { type: "boolean" }, lines: { type: "array", items: line }, buyer: { type: ["string", "null"] } },
        required: ["mood", "isLate", "lines"],
      } as const;
      const [full, empty] = await client.extract("test/spans", [text, ""], { schema, params: { threshold: 0 } });
      const order: { mood: "calm" | "very angry"; isLate: boolean; lines: { product: string }[]; buyer?: string | null } = full!.data!;
      check(mood.enum.includes(order.mood) && typeof order.isLate === "boolean" && order.lines[0]!.product, "values");
      check(text.includes(order.buyer!), "a span of the text");
      check(full!.entities.some((span) => span.label === "buyer" && span.text === order.buyer), "evidence");
      check(empty!.error instanceof InvalidInputError && empty!.data === undefined, "an empty text has no mood");
      check(empty!.error.message.includes("items[1]") && empty!.error.message.includes("mood"), empty!.error.message);

      const age = { type: "object", properties: { who: { type: "object", properties: { age: { type: "integer" } } } }, required: ["who"] } as const;
      const [incomplete, complete] = await client.extract("test/spans", ["queue worker", text], { schema: age, params: { threshold: 0 } });
      const { age: value }: { age?: number } = complete!.data!.who;
      equal(value, 12);
      check(incomplete!.error?.message.includes("who was not found"), String(incomplete!.error));
      const params = { threshold: 0, on_item_error: "fail" } as const;
      const failure = await catchError(client.extract("test/spans", "queue worker", { schema: age, params }));
      check(failure instanceof InvalidInputError && failure.message.includes("who was"), String(failure));
    },

    async "a whole number that a number holds is one, however large it is"() {
      const schema = { type: "object", properties: { age: { type: "integer" } }, required: ["age"] } as const;
      const { data } = await client.extract("test/spans", "queue worker at 4912345678 o'clock.", { schema, params: { threshold: 0 } });
      equal(data!.age + 1, 4912345679);
      const numbers = [2n ** 32n, -(2n ** 53n) + 1n, 2n ** 53n];
      equal((decode(encode({ numbers })) as { numbers: unknown[] }).numbers.map(String), numbers.map(String));
      equal((decode(encode({ numbers })) as { numbers: unknown[] }).numbers.map((value) => typeof value), ["number", "number", "bigint"]);
    },

    async "a missing value is named behind a reference, and if its name is a property of all objects"() {
      const who = { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["age"] } as const;
      for (const group of ["$defs", "definitions"] as const) {
        const schema = { type: "object", properties: { who: { $ref: `#/${group}/Who` } }, [group]: { Who: who } };
        const [incomplete, complete] = await client.extract("test/spans", ["queue worker", "queue at 12 o'clock"], { schema, params: { threshold: 0 } });
        check(incomplete!.error?.message.includes("who.age was not found"), String(incomplete!.error));
        check((complete!.data as { who: { age: number } }).who.age === 12, JSON.stringify(complete!.data));
      }
      const schema = { type: "object", properties: { constructor: { type: "integer" } }, required: ["constructor"] } as const;
      const result = await client.extract("test/spans", "queue worker", { schema, params: { threshold: 0 } });
      check(result.error?.message.includes("constructor was not found"), String(result.error));
    },

    async "a schema of a library checks and converts the values"() {
      class Mood {
        constructor(readonly name: string) {}
      }
      const targets: string[] = [];
      const standard = (allowed: readonly string[]): StandardSchema<Mood> => ({
        "~standard": {
          validate: async (value) => {
            const { mood } = value as { mood: string };
            if (!allowed.includes(mood)) return { issues: [{ message: `is ${mood}`, path: [{ key: "mood" }] }] };
            return { value: new Mood(mood) };
          },
          jsonSchema: {
            input: ({ target }) => {
              targets.push(target);
              return { type: "object", properties: { mood: { enum: ["calm", "angry"] } } };
            },
          },
        },
      });
      const result = await client.extract("test/spans", "a text", { schema: standard(["calm", "angry"]) });
      const value: Mood = result.data!;
      check(value instanceof Mood && ["calm", "angry"].includes(value.name), "an instance");
      equal(targets, ["draft-2020-12"]);
      const rejected = await client.extract("test/spans", "a text", { schema: standard([]) });
      check(rejected.error?.message.includes(`mood: is ${value.name}`), String(rejected.error));
      const withoutJsonSchema = { "~standard": { validate: () => ({}) } } as unknown as StandardSchema;
      const twoSchemas = { schema: standard([]), params: { output_schema: {} } };
      for (const [options, word] of [[{ schema: withoutJsonSchema }, "JSON Schema"], [twoSchemas, "output_schema"]] as const) {
        const failure = await catchError(client.extract("test/spans", "a text", options));
        check(failure instanceof InvalidInputError && failure.message.includes(word) && failure.param === "schema", String(failure));
      }
    },

    async "a redacted text is restored, in both kinds of offsets"() {
      const texts = ["🗼 ada@example.org, Zoe\u0301 and ada@example.org", "to ada@example.org"];
      for (const offsets of ["code_points", "utf16"] as const) {
        const kinds = ["person", "email"];
        const results = await client.redact("test/gliner", texts, { params: { kinds, style: "hash", offsets }, partTokens: 1 });
        equal(results.map((result) => restore(result.text!, result.map!)), texts);
        const hashes = results.flatMap((result) => result.text!.match(/\[EMAIL_[0-9a-f]{16}\]/g) ?? []);
        equal([hashes.length, new Set(hashes).size], [3, 1]);
        let message = "";
        try {
          restore(`${results[0]!.text!} `, results[0]!.map!);
        } catch (error) {
          message = (error as Error).message;
        }
        check(message.includes("another text"), message);
      }
    },

    async "a stream yields the results of a list, in order"() {
      const texts = Array.from({ length: 60 }, (_, number) => `text ${number}`);
      async function* source() {
        yield* texts;
      }
      const expected = await client.encode(MINI, texts);
      let place = 0;
      for await (const result of client.encodeStream(MINI, source(), { partTokens: 64 })) {
        near(result.dense!, expected[place++]!.dense!, 2e-3);
      }
      equal(place, texts.length);
    },

    async "the results of a list in several parts are one list"() {
      const texts = Array.from({ length: 40 }, (_, number) => `text ${number}`);
      const progress: number[] = [];
      const results = await client.encode(MINI, texts, { partTokens: 32, onProgress: ({ done }) => progress.push(done) });
      const [last] = await client.encode(MINI, [texts[39]!]);
      near(results[39]!.dense!, last!.dense!, 2e-3);
      equal(progress[progress.length - 1], 40);
      check(progress.length > 2, "several parts");
    },

    async "the cached items of all parts are counted"() {
      const usages = [{ cached_items: 1, cached_tokens: 4 }, {}, { cached_items: 1, cached_tokens: 5 }];
      const fakeFetch = async () => new Response(encode({ model: MINI, items: [{}], usage: usages.pop() }));
      const other = new SIEClient({ ...options, fetch: fakeFetch, partTokens: 1 });
      const { usage } = await other.encode(MINI, ["a", "b", "c"]);
      equal([usage.cachedItems, usage.cachedTokens], [2, 9]);
      equal((await other.encode(MINI, [])).usage.cachedItems, undefined);
    },

    async "a name that leads to another route is refused before it is sent"() {
      const urls: string[] = [];
      const other = new SIEClient({ baseUrl: "http://127.0.0.1:9/prefix", fetch: async (input) => (urls.push(input), Response.json({})) });
      const part = { name: "a", rows: 1, failed: 0, bytes: 1, sha256: "", source: "a" };
      const jobMethods = ["get", "pause", "resume", "cancel", "retry", "delete", "wait", "manifest", "rows"] as const;
      const calls: [string, (name: string) => Promise<unknown>][] = [
        ["model", (name) => other.encode(name, "a")],
        ["model", (name) => other.score(name, "a", ["b"])],
        ["model", (name) => other.extract(name, "a")],
        ["model", (name) => other.redact(name, "a")],
        ["model", (name) => other.encodeStream(name, ["a"]).next()],
        ["model", (name) => other.extractStream(name, ["a"]).next()],
        ["model", (name) => other.model(name)],
        ["pool", (name) => other.pools.get(name)],
        ["pool", (name) => other.pools.renew(name)],
        ["pool", (name) => other.pools.delete(name)],
        ["file", (name) => other.files.get(name)],
        ["file", (name) => other.files.content(name)],
        ["file", (name) => other.files.delete(name)],
        ["job", (name) => other.jobs.part(name, part)],
        ...jobMethods.map((method): [string, (name: string) => Promise<unknown>] => ["job", (name) => other.jobs[method](name)]),
        ["path", (name) => other.json("GET", `/v1/models/${name}`)],
        ["path", (name) => other.json("GET", `/v1/models/${name.split("/").map(encodeURIComponent).join("/")}`)],
      ];
      const names = ["", ".", "..", "../pools", "a/..", "a/../b", "a//b", "/a", "a/", "%2e%2e/pools", "a\\..\\b", "a\n", "a\u007f"];
      for (const name of names) {
        for (const [param, send] of calls) {
          const error = await catchError(send(name));
          check(error instanceof InvalidInputError && error.details["param"] === param, `${param} ${JSON.stringify(name)}: ${String(error)}`);
        }
      }
      for (const name of ["a?b", "a#b"]) check((await catchError(other.model(name))) instanceof InvalidInputError, name);
      equal(urls, []);
      await other.json("GET", "/v1/history?step_s=60&filter=../x");
      await other.json("GET", "/v1/models/org/m:p@1");
      equal(urls, ["http://127.0.0.1:9/prefix/v1/history?step_s=60&filter=../x", "http://127.0.0.1:9/prefix/v1/models/org/m:p@1"]);
    },

    async "errors have their classes"() {
      const missing = await catchError(client.encode("test/min", "a"));
      check(missing instanceof ModelNotFoundError, `${String(missing)}`);
      equal([missing.code, missing.status], ["MODEL_NOT_FOUND", 404]);
      check((missing.details["suggestions"] as string[]).includes(MINI), "suggestions");
      check((await catchError(client.encode(MINI, { text: 7 as never }))) instanceof InvalidInputError, "a text that is no string");
      for (const number of [2n ** 64n, -(2n ** 63n) - 1n]) {
        const error = await catchError(client.encode(MINI, { text: "a", metadata: { numbers: [number] } }));
        check(error instanceof InvalidInputError && error.message.includes("64 bits"), String(error));
      }
      for (const text of ["a cut \ud83d", `${"long ".repeat(20)}\ud83d`]) {
        for (const item of [text, { text: "a", metadata: { [text]: 1 } }]) {
          const error = await catchError(client.encode(MINI, item));
          check(error instanceof InvalidInputError && error.message.includes("surrogate"), String(error));
        }
      }
      const unreachable = new SIEClient({ baseUrl: "http://127.0.0.1:9", connectionTimeoutMs: 0 });
      check((await catchError(unreachable.health())) instanceof SIEConnectionError, "no server");
      const controller = new AbortController();
      controller.abort();
      check((await catchError(client.encode(MINI, "a", { signal: controller.signal }))) instanceof SIEAbortError, "aborted");
    },

    async "a request that is refused for lack of capacity is sent again"() {
      let calls = 0;
      const fetchAfterRefusals = async (input: string, init: RequestInit): Promise<Response> => {
        calls += 1;
        if (calls > 2) return fetch(input, init);
        const error = { code: "QUEUE_FULL", message: "full", retryable: true };
        return new Response(JSON.stringify({ error }), { status: 503, headers: { "retry-after": "0", "content-type": "application/json" } });
      };
      const other = new SIEClient({ ...options, fetch: fetchAfterRefusals });
      equal((await other.encode(MINI, "a")).model, MINI);
      equal(calls, 3);
    },

    async "a proxy whose error has a number as its code is waited for"() {
      const answers = [() => Response.json({ error: { code: 503, message: "no upstream" } }, { status: 503 }), () => Response.json({ data: [] })];
      const other = new SIEClient({ ...options, fetch: async () => answers.shift()!() });
      equal(await other.models(), []);
    },

    async "a failure that stays is not retried, and says its reason"() {
      const tls = { cause: { code: "ERR_SSL_WRONG_VERSION_NUMBER" } };
      for (const [fault, reason] of [[tls, "WRONG_VERSION"], [{ cause: { code: "CERT_HAS_EXPIRED" } }, "CERT_HAS_EXPIRED"]] as const) {
        let calls = 0;
        const other = new SIEClient({ ...options, fetch: async () => (calls++, Promise.reject(Object.assign(new TypeError("fetch failed"), fault))) });
        const error = await catchError(other.health());
        check(error instanceof SIEConnectionError && error.message.includes(reason), String(error));
        equal(calls, 1);
      }
      const badPort = async () => Promise.reject(Object.assign(new TypeError("fetch failed"), { cause: new Error("bad port") }));
      const unsent = await catchError(new SIEClient({ ...options, fetch: badPort, connectionTimeoutMs: 0 }).health());
      check(String(unsent).includes("bad port"), String(unsent));
      const redirect = await catchError(new SIEClient({ ...options, fetch: async () => Response.error() }).health());
      check(redirect instanceof ServerError && redirect.message.startsWith("redirect: "), String(redirect));
    },

    async "a body may take any time while its bytes come"() {
      const { setTimeout: startTimer, clearTimeout: endTimer } = globalThis;
      const timers = new Map<unknown, { atMs: number; work: () => void }>();
      let nowMs = 0;
      const slowFetch = (pieceMs: number) => async (_: string, { signal }: RequestInit): Promise<Response> => {
        let pieces = 3;
        const pull = (controller: ReadableStreamDefaultController<Uint8Array>) => {
          nowMs += pieceMs;
          for (const { atMs, work } of timers.values()) if (atMs <= nowMs) work();
          if (signal!.aborted) controller.error(new TypeError("aborted"));
          else if (pieces--) controller.enqueue(new Uint8Array([pieces]));
          else controller.close();
        };
        return new Response(new ReadableStream({ pull }, { highWaterMark: 0 })); // a piece is made when it is read
      };
      globalThis.setTimeout = ((work: () => void, ms: number) => {
        const timer = {};
        timers.set(timer, { atMs: nowMs + ms, work });
        return timer;
      }) as unknown as typeof setTimeout;
      globalThis.clearTimeout = (timer: unknown) => void timers.delete(timer);
      try {
        const read = (pieceMs: number) => new SIEClient({ ...options, fetch: slowFetch(pieceMs), waitForCapacity: false }).files.content("file-1");
        equal([...(await read(100_000))], [2, 1, 0]);
        const late = await catchError(read(160_000));
        check(late instanceof SIEConnectionError && late.message.includes("none within 150000 ms"), String(late));
        equal(timers.size, 0);
      } finally {
        Object.assign(globalThis, { setTimeout: startTimer, clearTimeout: endTimer });
      }
    },

    async "replies that cannot be right are errors"() {
      const replying = (reply: () => Response) => new SIEClient({ ...options, fetch: async () => reply(), partTokens: 1 });
      const score = { item_id: "7", score: 1, rank: 0 };
      const scoring = replying(() => new Response(encode({ model: "m", scores: [score], usage: {} })));
      const values = { nd: true, type: "<f4", kind: "", shape: [-2, -2], data: new Uint8Array(16) };
      const encoding = replying(() => new Response(encode({ model: "m", items: [{ multivector: { values } }], usage: {} })));
      const jobs = replying(() => Response.json({ data: [], next: "job-1" })).jobs.list();
      const files = replying(() => Response.json({ data: [], has_more: true, last_id: "file-1" })).files.list();
      const calls = [scoring.score("m", "q", ["a", "b"]), encoding.encode("m", "a"), jobs.next(), files.next()];
      for (const call of calls) {
        const error = await catchError(call);
        check(error instanceof ServerError && error.message.includes("could not be read"), String(error));
      }
      equal([...readArray({ ...values, shape: [2, 2] }).data], [0, 0, 0, 0]);
    },

    async "a part of which all items fail leaves the results of the other parts"() {
      const fault = { code: "INVALID_INPUT", message: "too long" };
      const usage = { prompt_tokens: 1, total_tokens: 1 };
      const fakeFetch = async (_: string, init: RequestInit): Promise<Response> => {
        const { items } = decode(init.body as Uint8Array) as { items: { text?: string }[] };
        const isLong = items.every((item) => (typeof item === "string" ? item : item.text) === "long");
        if (isLong) return Response.json({ error: fault, errors: items.map((_, index) => ({ index, ...fault })) }, { status: 400 });
        const slots = items.map((_, index) => ({ score: 0.5, item_id: (items[index] as { id?: string }).id, rank: index, usage }));
        return new Response(encode({ model: "m", query_id: "q", timing: {}, usage, items: slots, scores: slots }));
      };
      const other = new SIEClient({ ...options, fetch: fakeFetch, partTokens: 1, concurrency: 1 });
      const items = [{ id: "x", text: "long", metadata: { n: 1 } }, "short"];
      const results = await other.extract("m", items);
      equal(results.map(({ error }) => error?.code ?? ""), ["INVALID_INPUT", ""]);
      equal([results[0]!.id, results[0]!.metadata, results[0]!.entities], ["x", { n: 1 }, []]);
      const scored = await other.score("m", "q", items);
      equal(scored.scores.map(({ itemId, score }) => [itemId, score]), [["item-1", 0.5], ["x", null]]);
      equal(scored.queryId, "q");
      const streamed = [];
      for await (const { error } of other.extractStream("m", ["long", "short", "long"])) streamed.push(error?.code ?? "");
      equal(streamed, ["INVALID_INPUT", "", "INVALID_INPUT"]);
      for (const [list, params] of [[["long", "long"], {}], [items, { on_item_error: "fail" }]] as const) {
        check((await catchError(other.extract("m", [...list], { params }))) instanceof InvalidInputError, "a failed list");
      }
    },

    async "a part that fails ends the requests of the other parts"() {
      const aborted: string[] = [];
      let requests = 0;
      const fakeFetch = (_: string, init: RequestInit): Promise<Response> => {
        requests += 1;
        if (requests === 3) {
          return Promise.resolve(Response.json({ error: { code: "INVALID_INPUT", message: "items[0]: no" } }, { status: 400 }));
        }
        return new Promise((_resolve, reject) => {
          init.signal!.addEventListener("abort", () => {
            aborted.push("request");
            reject(new TypeError("aborted"));
          });
        });
      };
      const other = new SIEClient({ ...options, fetch: fakeFetch, partTokens: 1, concurrency: 3 });
      const error = await catchError(other.encode(MINI, ["a", "b", "c", "d", "e"]));
      check(error instanceof InvalidInputError && error.message.includes("items[2]"), String(error));
      equal(aborted, ["request", "request"]);
      await new Promise((resolve) => setTimeout(resolve));
      equal(requests, 3, "requests");
    },

    async "an operation is a success if an attempt without an answer did it, and an upload is not repeated"() {
      const requests: string[] = [];
      const fakeFetch = async (input: string, init: RequestInit): Promise<Response> => {
        const line = `${init.method} ${new URL(input).pathname}`;
        requests.push(line);
        const isFirst = requests.filter((request) => request === line).length === 1;
        if (isFirst && init.method !== "GET") throw new TypeError("the connection broke");
        if (init.method === "GET") return Response.json({ id: "job-1", state: "cancelled", counts: {}, request: {} });
        const [code, status] = init.method === "DELETE" ? ["NOT_FOUND", 404] : ["CONTENT_CONFLICT", 409];
        return Response.json({ error: { code, message: "no" } }, { status: status as number });
      };
      const other = new SIEClient({ ...options, fetch: fakeFetch, connectionTimeoutMs: 10_000 });
      await other.jobs.delete("job-1");
      check((await catchError(other.jobs.delete("job-1"))) instanceof NotFoundError, "a job that is gone");
      equal((await other.jobs.cancel("job-1")).state, "cancelled");
      check((await catchError(other.jobs.cancel("job-1"))) instanceof ContentConflictError, "a job that is cancelled");
      check((await catchError(other.files.upload(new Blob(["{}"]), "rows.jsonl"))) instanceof SIEConnectionError, "an upload");
      equal(requests.filter((request) => request === "POST /v1/files").length, 1);
      let uploads = 0;
      const proxy = new SIEClient({ ...options, fetch: async () => (uploads++, new Response("of a proxy", { status: 504 })) });
      const failure = await catchError(proxy.files.upload(new Blob(["{}"]), "rows.jsonl"));
      check(failure instanceof SIEError && failure.status === 504, "an upload through a proxy");
      equal(uploads, 1);
    },

    async "a deadline may be longer than the longest timer"() {
      const fakeFetch = (_: string, init: RequestInit): Promise<Response> =>
        new Promise((resolve, reject) => {
          init.signal!.addEventListener("abort", () => reject(new TypeError("aborted")));
          setTimeout(() => resolve(Response.json({ status: "healthy", workers: [], models: [], cluster: {} })), 50);
        });
      const other = new SIEClient({ ...options, fetch: fakeFetch, timeoutMs: 2 ** 31, waitForCapacity: false });
      equal(await other.json("GET", "/v1/models"), { status: "healthy", workers: [], models: [], cluster: {} });
    },

    async "models, pools and health are read"() {
      check((await client.models({ task: "score" })).some((model) => model.id === "test/cross"), "models");
      equal((await client.model(MINI)).id, MINI);
      check((await client.pools.list()).some((pool) => pool.name === "default"), "pools");
      const unleased = new SIEClient({ ...options, fetch: async () => Response.json({ message: "Pool renewed", expires_at: null }) });
      check((await unleased.pools.renew("default")).getTime() > Date.now(), "a pool without a lease");
      equal((await client.health()).status, "healthy");
    },

    async "a job is submitted once, and its whole output is downloaded"() {
      const data = new TextEncoder().encode("a part");
      const sha256 = "3513ae1a39086c2a2738daa630b9e2f304f41b5945228e0741a117a508fc51b9";
      const part = { name: "part-00000.parquet", rows: 1, failed: 0, bytes: data.length, sha256, source: "a" };
      const states = ["queued", "running", "completed"];
      const keys: string[] = [];
      let attempts = 0;
      const requests: string[] = [];
      const fakeFetch = async (input: string, init: RequestInit): Promise<Response> => {
        const { pathname, search } = new URL(input);
        requests.push(`${init.method} ${pathname}${search}`);
        const job = { id: "job-1", state: states[0], counts: {}, request: {} };
        const pages: Record<string, unknown> = {
          "?": { data: [job], next: "job-1" },
          "?after=1": { job: "job-1", parts: [{ ...part, sha256: "0".repeat(64) }], next: null },
        };
        if (init.method === "POST" && pathname === "/v1/jobs") {
          keys.push(new Headers(init.headers).get("idempotency-key")!);
          if (attempts++ === 0) throw new TypeError("the connection broke");
          return Response.json(job, { status: 201 });
        }
        if (pathname.endsWith("/part")) return new Response(data);
        if (pathname.endsWith("/manifest")) return Response.json(pages[search] ?? { job: "job-1", parts: [part], next: 1 });
        if (pathname === "/v1/jobs") {
          return Response.json(search.includes("after") ? { data: [], next: null } : pages["?"]);
        }
        if (states.length > 1 && init.method === "GET") states.shift();
        return Response.json({ ...job, state: pathname.endsWith("/pause") ? "paused" : states[0] });
      };
      const other = new SIEClient({ ...options, fetch: fakeFetch, connectionTimeoutMs: 10_000 });
      const job = await other.jobs.submit({ model: MINI, input: { url: "s3://b/docs/" }, output: { format: "npy" } });
      equal(keys.length, 2);
      equal(keys[0], keys[1], "one job");
      const observedStates: string[] = [];
      equal((await other.jobs.wait(job.id, { onLook: ({ state }) => observedStates.push(state) })).state, "completed");
      equal(observedStates, ["running", "completed"]);
      equal((await other.jobs.pause(job.id)).state, "paused");
      const { parts } = await other.jobs.manifest(job.id);
      equal(parts.length, 2);
      equal([...(await other.jobs.part(job.id, parts[0]!))], [...data]);
      if (globalThis.crypto?.subtle) {
        check((await catchError(other.jobs.part(job.id, parts[1]!))) instanceof ServerError, "another digest");
      }
      check((await catchError(other.jobs.part(job.id, { ...part, bytes: 5 }))) instanceof ServerError, "another length");
      const ids: string[] = [];
      for await (const { id } of other.jobs.list("running")) ids.push(id);
      equal(ids, ["job-1"]);
      equal(requests.slice(-2), ["GET /v1/jobs?limit=100&state=running", "GET /v1/jobs?limit=100&state=running&after=job-1"]);
      check((await catchError(other.jobs.get("../pools"))) instanceof InvalidInputError, "no id");
    },

    async "a job processes the rows of an uploaded file"() {
      const rows = TEXTS.map((text, number) => JSON.stringify({ id: `row-${number}`, text }));
      const file = await client.files.upload(new Blob([`${rows.join("\n")}\n`]), "rows.jsonl");
      equal((await client.files.get(file.id)).purpose, "jobs");
      equal(new TextDecoder().decode(await client.files.content(file.id)), `${rows.join("\n")}\n`);
      const ids: string[] = [];
      for await (const { id } of client.files.list()) ids.push(id);
      check(ids.includes(file.id), "the list of files");
      const job = await client.jobs.submit({
        model: MINI, input: { file: file.id, text: "{text}", id: "id" }, output: { format: "jsonl" },
      });
      const ended = await client.jobs.wait(job.id);
      equal([ended.state, ended.counts.done, ended.counts.failed], ["completed", TEXTS.length, 0]);
      const { parts } = await client.jobs.manifest(job.id);
      const outputRows: { id: string }[] = [];
      for (const part of parts) {
        const text = new TextDecoder().decode(await client.jobs.part(job.id, part));
        outputRows.push(...text.trimEnd().split("\n").map((line): { id: string } => JSON.parse(line)));
      }
      equal(outputRows.map((row) => row.id).sort(), ["row-0", "row-1", "row-2"]);
      equal((await client.jobs.rows(job.id)).map((row) => row.id).sort(), ["row-0", "row-1", "row-2"]);
      equal(await client.jobs.rows(job.id, { failed: true }), []);
      await client.jobs.delete(job.id);
      await client.files.delete(file.id);
      check((await catchError(client.files.get(file.id))) instanceof SIEError, "a file that was deleted");
    },

    async "watch connects again if a WebSocket is refused after another one has yielded, and polls if it cannot send the key"() {
      const outcomes = ["frame", "refused", "frame"];
      class FakeSocket {
        onopen = null;
        onmessage: ((event: { data: string }) => void) | null = null;
        onerror: (() => void) | null = null;
        onclose: (() => void) | null = null;
        constructor() {
          const outcome = outcomes.shift();
          setTimeout(() => {
            if (outcome === "frame") this.onmessage?.({ data: "{}" });
            this.onclose?.();
          });
        }
        close() {}
      }
      const health = { status: "healthy", workers: [], models: [], cluster: {} };
      const fakeOptions = { ...options, fetch: async () => Response.json(health) };
      const webSocket = FakeSocket as unknown as WebSocketClass;
      const frames = new SIEClient({ ...fakeOptions, webSocket }).watch();
      await frames.next();
      equal((await frames.next()).value, {});
      equal(outcomes, []);
      await frames.return();
      const refused = await catchError(new SIEClient({ ...fakeOptions, webSocket }).watch().next());
      check(refused instanceof SIEConnectionError && refused.message.includes("WebSocket"), String(refused));
      if (!("document" in globalThis)) return;
      for (const key of [{ apiKey: "key" }, { headers: { Authorization: "Bearer key" } }]) {
        const polled = new SIEClient({ ...fakeOptions, ...key }).watch();
        equal((await polled.next()).value?.models, []);
        await polled.return();
      }
    },

    async "watch yields the status"() {
      for await (const frame of client.watch()) {
        check(frame.workers.length === 1, "one worker");
        return;
      }
    },
  };
}
