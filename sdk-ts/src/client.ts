import { sendJson } from "./calls.js";
import * as cluster from "./cluster.js";
import { invalid } from "./errors.js";
import { Files } from "./files.js";
import { Jobs } from "./jobs.js";
import { type CallOptions, type ClientOptions, Session } from "./options.js";
import { addHashKey } from "./redaction.js";
import { stream } from "./streams.js";
import type {
  EncodeOptions, EncodeResult, ExtractOptions, ExtractResult, Health, Input, JsonOptions, Model, ModelFilters,
  RedactOptions, RedactResult, Results, Schema, SchemaOptions, SchemaResult, ScoreOptions, ScoreResult, StatusFrame,
  StreamOptions, Values,
} from "./types.js";
import { callVerb, ENCODE, EXTRACT, extractBySchema, REDACT, score, type Verb } from "./verbs.js";
import { watch } from "./watching.js";

/**
 * Client of one server. `options` are the defaults for all of its calls. If the server has no capacity (a full queue, a model
 * that is loading), a call waits up to 15 minutes, unless `waitForCapacity` is false. All methods throw SIEError, also if all
 * items of a list failed, as for a single item; a stream yields results with `error` then. Streams also throw the errors of
 * their source.
 */
export class SIEClient {
  readonly pools: cluster.Pools;
  readonly jobs: Jobs;
  readonly files: Files;
  readonly #session: Session;

  constructor(options: ClientOptions) {
    if (typeof options !== "object" || options === null) throw invalid("options: expected an object with baseUrl");
    this.#session = Session.fromOptions(options);
    this.pools = new cluster.Pools(this.#session);
    this.jobs = new Jobs(this.#session);
    this.files = new Files(this.#session);
  }

  /** Return the vectors of one item as a result, or of a list as a list of results in order. A failed item has `error`. */
  encode(model: string, items: readonly Input[], options?: EncodeOptions): Promise<Results<EncodeResult>>;
  encode(model: string, item: Input, options?: EncodeOptions): Promise<EncodeResult>;
  encode(model: string, items: Input | readonly Input[], options: EncodeOptions = {}): Promise<unknown> {
    return this.#callVerb(ENCODE, model, items, options);
  }

  /** Return the scores of items for a query, best first. A failed item has `error`. Throws if the query fails. */
  async score(model: string, query: Input, items: Input | readonly Input[], options: ScoreOptions = {}): Promise<ScoreResult> {
    const { params, ...call } = options;
    return score(model, query, toList(items), params, this.#session.forCall(call));
  }

  /**
   * Extract from one item (returns a result) or from a list (returns a list of results, in order). With a `schema`, `data`
   * has the type of the schema: a JSON Schema as a literal, or a schema of a library such as zod.
   */
  extract<const S extends Schema>(
    model: string, items: readonly Input[], options: SchemaOptions<S>,
  ): Promise<Results<SchemaResult<Values<S>>>>;
  extract<const S extends Schema>(model: string, item: Input, options: SchemaOptions<S>): Promise<SchemaResult<Values<S>>>;
  extract(model: string, items: readonly Input[], options?: ExtractOptions): Promise<Results<ExtractResult>>;
  extract(model: string, item: Input, options?: ExtractOptions): Promise<ExtractResult>;
  async extract(
    model: string, items: Input | readonly Input[], options: ExtractOptions & { schema?: Schema } = {},
  ): Promise<unknown> {
    const { schema, ...extractOptions } = options;
    if (schema === undefined) return this.#callVerb(EXTRACT, model, items, extractOptions);
    const { params, ...call } = extractOptions;
    return unwrap(items, await extractBySchema(model, toList(items), params, this.#session.forCall(call), schema));
  }

  /**
   * Replace personal data in one text (returns a result) or in a list (returns a list of results, in order). `restore(text,
   * map)` undoes it. A failed item has `error` and no text.
   */
  redact(model: string, items: readonly Input[], options?: RedactOptions): Promise<Results<RedactResult>>;
  redact(model: string, item: Input, options?: RedactOptions): Promise<RedactResult>;
  async redact(model: string, items: Input | readonly Input[], options: RedactOptions = {}): Promise<unknown> {
    return this.#callVerb(REDACT, model, items, { ...options, params: addHashKey(options.params) });
  }

  /** Yield the vectors of items while `source` yields the items, in order. Errors of `source` are thrown unchanged. */
  encodeStream(
    model: string,
    source: Iterable<Input> | AsyncIterable<Input>,
    { params, lingerMs, ...call }: EncodeOptions & StreamOptions = {},
  ): AsyncGenerator<EncodeResult, void, undefined> {
    return stream(ENCODE, model, source, params, lingerMs, this.#session.forCall(call));
  }

  /** Extract from items while `source` yields them, in order. Errors of `source` are thrown unchanged. */
  extractStream(
    model: string,
    source: Iterable<Input> | AsyncIterable<Input>,
    { params, lingerMs, ...call }: ExtractOptions & StreamOptions = {},
  ): AsyncGenerator<ExtractResult, void, undefined> {
    return stream(EXTRACT, model, source, params, lingerMs, this.#session.forCall(call));
  }

  /** Return the models of the catalogue, or those that pass the filters. */
  async models(filters: ModelFilters = {}, options?: CallOptions): Promise<Model[]> {
    return cluster.models(filters, this.#session.forCall(options));
  }

  /** Return one model or variant of the catalogue. Never loads it. */
  async model(id: string, options?: CallOptions): Promise<Model> {
    return cluster.model(id, this.#session.forCall(options));
  }

  /** Return the configuration of the gateway, and the state of its workers and models. */
  async health(options?: CallOptions): Promise<Health> {
    return cluster.health(this.#session.forCall(options));
  }

  /** Yield the status of workers and models each second. Connects again after a broken connection. */
  watch(options?: CallOptions): AsyncGenerator<StatusFrame, void, undefined> {
    return watch(this.#session.forCall(options));
  }

  /**
   * Send a request to any route, for operations without a method of their own, and return the JSON of the reply. Errors,
   * retries and options are those of all calls. `path`: with its query, such as `/v1/history?step_s=60`. `T` is not checked.
   */
  async json<T = unknown>(method: string, path: string, { body, ...call }: JsonOptions = {}): Promise<T> {
    const session = this.#session.forCall(call);
    return (await sendJson(method, path, session, body, session.withinMs)) as T;
  }

  async #callVerb<R>(
    verb: Verb<R>,
    model: string,
    items: Input | readonly Input[],
    { params, ...call }: EncodeOptions | ExtractOptions | RedactOptions,
  ): Promise<R | Results<R>> {
    return unwrap(items, await callVerb(verb, model, toList(items), params, this.#session.forCall(call)));
  }
}

/** Return the results of a list, or the single result of one item. */
function unwrap<R>(items: Input | readonly Input[], results: Results<R>): R | Results<R> {
  return Array.isArray(items) ? results : results[0]!;
}

function toList(items: Input | readonly Input[]): readonly Input[] {
  return Array.isArray(items) ? (items as readonly Input[]) : [items as Input];
}
