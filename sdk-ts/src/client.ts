import { json } from "./calls.js";
import * as cluster from "./cluster.js";
import { invalid } from "./errors.js";
import { Files } from "./files.js";
import { Jobs } from "./jobs.js";
import { type CallOptions, type ClientOptions, Session } from "./options.js";
import { keyed } from "./redaction.js";
import { stream } from "./streams.js";
import type {
  EncodeOptions, EncodeResult, ExtractOptions, ExtractResult, Health, Input, JsonOptions, Model, ModelFilters,
  RedactOptions, RedactResult, Results, Schema, SchemaOptions, SchemaResult, ScoreOptions, ScoreResult, StatusFrame,
  StreamOptions, Values,
} from "./types.js";
import { ENCODE, EXTRACT, perItem, perSchema, REDACT, score, type Verb } from "./verbs.js";
import { watch } from "./watching.js";

/**
 * Client of one server. `options` hold for all of its calls. Waits for capacity (a full queue, a loading model) up to 15
 * minutes unless `waitForCapacity` is false. All methods throw SIEError and nothing else.
 */
export class SIEClient {
  readonly pools: cluster.Pools;
  readonly jobs: Jobs;
  readonly files: Files;
  readonly #session: Session;

  constructor(options: ClientOptions) {
    if (typeof options !== "object" || options === null) throw invalid("options: expected an object with baseUrl");
    this.#session = Session.of(options);
    this.pools = new cluster.Pools(this.#session);
    this.jobs = new Jobs(this.#session);
    this.files = new Files(this.#session);
  }

  /** Vectors of one item (a result) or of a list (a list of results, in order). An item that failed carries `error`. */
  encode(model: string, items: readonly Input[], options?: EncodeOptions): Promise<Results<EncodeResult>>;
  encode(model: string, item: Input, options?: EncodeOptions): Promise<EncodeResult>;
  encode(model: string, items: Input | readonly Input[], options: EncodeOptions = {}): Promise<unknown> {
    return this.#each(ENCODE, model, items, options);
  }

  /** Scores of items against a query, best first. Throws for the query; an item that failed carries `error`. */
  async score(model: string, query: Input, items: Input | readonly Input[], options: ScoreOptions = {}): Promise<ScoreResult> {
    const { params, ...call } = options;
    return score(model, query, listed(items), params, this.#session.forCall(call));
  }

  /**
   * What is found in one item (a result) or in a list (a list of results, in order). With a `schema`, `data` has its type:
   * a JSON Schema as a literal, or a schema of a library such as zod.
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
    const { schema, ...plain } = options;
    if (schema === undefined) return this.#each(EXTRACT, model, items, plain);
    const { params, ...call } = plain;
    return only(items, await perSchema(model, listed(items), params, this.#session.forCall(call), schema));
  }

  /**
   * One text (a result) or a list (a list of results, in order) without personal data; `restore(text, map)` gives a text
   * back. An item that failed carries `error` and no text.
   */
  redact(model: string, items: readonly Input[], options?: RedactOptions): Promise<Results<RedactResult>>;
  redact(model: string, item: Input, options?: RedactOptions): Promise<RedactResult>;
  async redact(model: string, items: Input | readonly Input[], options: RedactOptions = {}): Promise<unknown> {
    return this.#each(REDACT, model, items, { ...options, params: keyed(options.params) });
  }

  /** Vectors of items as they come, in their order. What `source` throws is thrown as it is. */
  encodeStream(
    model: string,
    source: Iterable<Input> | AsyncIterable<Input>,
    { params, lingerMs, ...call }: EncodeOptions & StreamOptions = {},
  ): AsyncGenerator<EncodeResult, void, undefined> {
    return stream(ENCODE, model, source, params, lingerMs, this.#session.forCall(call));
  }

  /** What is found in items as they come, in their order. What `source` throws is thrown as it is. */
  extractStream(
    model: string,
    source: Iterable<Input> | AsyncIterable<Input>,
    { params, lingerMs, ...call }: ExtractOptions & StreamOptions = {},
  ): AsyncGenerator<ExtractResult, void, undefined> {
    return stream(EXTRACT, model, source, params, lingerMs, this.#session.forCall(call));
  }

  /** The catalogue, or what of it fits. */
  async models(filters: ModelFilters = {}, options?: CallOptions): Promise<Model[]> {
    return cluster.models(filters, this.#session.forCall(options));
  }

  /** One model or variant of the catalogue. Never loads it. */
  async model(id: string, options?: CallOptions): Promise<Model> {
    return cluster.model(id, this.#session.forCall(options));
  }

  /** What the cluster says of itself. */
  async health(options?: CallOptions): Promise<Health> {
    return cluster.health(this.#session.forCall(options));
  }

  /** The status of workers and models, each second, across reconnections, for as long as it is asked for. */
  watch(options?: CallOptions): AsyncGenerator<StatusFrame, void, undefined> {
    return watch(this.#session.forCall(options));
  }

  /**
   * The JSON that any route below the base URL replies, for what the other methods do not do. The errors, the waiting and
   * the options are those of all calls. `path`: with its query, such as `/v1/history?step_s=60`. `T` is not checked.
   */
  async json<T = unknown>(method: string, path: string, { body, ...call }: JsonOptions = {}): Promise<T> {
    const session = this.#session.forCall(call);
    return (await json(method, path, session, body, session.withinMs)) as T;
  }

  async #each<R>(
    verb: Verb<R>,
    model: string,
    items: Input | readonly Input[],
    { params, ...call }: EncodeOptions | ExtractOptions | RedactOptions,
  ): Promise<R | Results<R>> {
    return only(items, await perItem(verb, model, listed(items), params, this.#session.forCall(call)));
  }
}

function only<R>(items: Input | readonly Input[], results: Results<R>): R | Results<R> {
  return Array.isArray(items) ? results : results[0]!;
}

function listed(items: Input | readonly Input[]): readonly Input[] {
  return Array.isArray(items) ? (items as readonly Input[]) : [items as Input];
}
