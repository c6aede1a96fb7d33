// What a call may throw. The classes and their tree are those of the Python client (sdk/sie_client/errors.py).

export interface ErrorFacts {
  code?: string;
  status?: number;
  requestId?: string;
  retryable?: boolean;
  retryAfterMs?: number;
  details?: Record<string, unknown>;
  cause?: unknown;
}

/**
 * `code` is the server's (empty where it sent none), `status` the HTTP status (0: none), `details` the whole error map of
 * the body. `retryable`: whether the same request may succeed later. `requestId` finds it in the server's logs.
 */
export class SIEError extends Error {
  override name = "SIEError";
  readonly code: string;
  readonly status: number;
  readonly requestId: string;
  readonly retryable: boolean;
  readonly retryAfterMs: number | undefined;
  readonly details: Record<string, unknown>;
  /** An attempt got no answer, so the server may have run the request. */
  mayHaveRun = false;

  constructor(message: string, facts: ErrorFacts = {}) {
    super(message, facts.cause === undefined ? undefined : { cause: facts.cause });
    this.code = facts.code ?? "";
    this.status = facts.status ?? 0;
    this.requestId = facts.requestId ?? "";
    this.retryable = facts.retryable ?? false;
    this.retryAfterMs = facts.retryAfterMs;
    this.details = facts.details ?? {};
  }

  /** Refines the code; empty where there is none. */
  get reason(): string {
    return text(this.details["reason"]);
  }

  /** Path of the offending field; empty where there is none. */
  get param(): string {
    return text(this.details["param"]);
  }
}

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

/** The server could not be reached, or the connection broke. */
export class SIEConnectionError extends SIEError {
  override name = "SIEConnectionError";
}

/** The caller's AbortSignal ended the call; its reason is the `cause`. The name is the one that `fetch` gives. */
export class SIEAbortError extends SIEError {
  override name = "AbortError";
}

/** The request can never succeed as written, or could not even be sent. */
export class RequestError extends SIEError {
  override name = "RequestError";
}

/** The body, a parameter or a file is invalid, or the model does not support it. */
export class InvalidInputError extends RequestError {
  override name = "InvalidInputError";
}

/** The token is missing or wrong. */
export class AuthenticationError extends RequestError {
  override name = "AuthenticationError";
}

/** The token lacks the scope. */
export class PermissionDeniedError extends AuthenticationError {
  override name = "PermissionDeniedError";
}

/** A limit of reservations is reached, or the pool is not a reservation. */
export class PoolOperationForbiddenError extends PermissionDeniedError {
  override name = "PoolOperationForbiddenError";
}

/** No such path, or the object that the path names does not exist. */
export class NotFoundError extends RequestError {
  override name = "NotFoundError";
}

/** No such model, profile or revision: `details` has `suggestions`. */
export class ModelNotFoundError extends NotFoundError {
  override name = "ModelNotFoundError";
}

/** No such pool, or its lease has lapsed. */
export class PoolNotFoundError extends NotFoundError {
  override name = "PoolNotFoundError";
}

/** The path does not support that method. */
export class MethodNotAllowedError extends RequestError {
  override name = "MethodNotAllowedError";
}

/** The request contradicts what exists. */
export class ConflictError extends RequestError {
  override name = "ConflictError";
}

/** The bundle does not serve the model: `details` has `compatible_bundles`. */
export class BundleConflictError extends ConflictError {
  override name = "BundleConflictError";
}

/** A pool of that name has another specification. */
export class PoolConflictError extends ConflictError {
  override name = "PoolConflictError";
}

/** The configuration was changed by somebody else: `details` has `revision` and `diff`. */
export class ContentConflictError extends ConflictError {
  override name = "ContentConflictError";
}

/** The body, or one item, is larger than the server takes: `details` has `limit`. */
export class PayloadTooLargeError extends RequestError {
  override name = "PayloadTooLargeError";
}

/** The server takes no body of this `Content-Type` or `Content-Encoding`. */
export class UnsupportedMediaTypeError extends RequestError {
  override name = "UnsupportedMediaTypeError";
}

/** A configuration that cannot be used. */
export class ValidationFailedError extends RequestError {
  override name = "ValidationFailedError";
}

/** The idempotency key was used for another request. */
export class IdempotencyMismatchError extends RequestError {
  override name = "IdempotencyMismatchError";
}

/** The key's quota was still used up when the client's budget of waiting ended. */
export class RateLimitedError extends RequestError {
  override name = "RateLimitedError";
}

/** Every item failed, not all for the same cause: `details.errors` has each, `status` is 400, 500 or 503. */
export class AllItemsFailedError extends SIEError {
  override name = "AllItemsFailedError";
}

/** The server failed, or stayed without capacity for as long as the client was willing to wait. */
export class ServerError extends SIEError {
  override name = "ServerError";
}

/** The model could not compute this input. */
export class InferenceError extends ServerError {
  override name = "InferenceError";
}

/** A fault of the server; its log has the details under `requestId`. */
export class InternalServerError extends ServerError {
  override name = "InternalServerError";
}

/** The model cannot be loaded: `details` has `error_class`, `attempts` and `permanent`. */
export class ModelLoadFailedError extends ServerError {
  override name = "ModelLoadFailedError";
}

/** The LoRA cannot be loaded: `details` has `lora_id`. */
export class LoraLoadFailedError extends ServerError {
  override name = "LoraLoadFailedError";
}

/** No worker was ready when the client's budget of waiting ended: `details` has `gpu`, `bundle`, `estimated_wait_s`. */
export class ProvisioningError extends ServerError {
  override name = "ProvisioningError";
}

/** The model was still loading when the client's budget of waiting ended. */
export class ModelLoadingError extends ServerError {
  override name = "ModelLoadingError";
}

/** The LoRA was still loading when the client's budget of waiting ended. */
export class LoraLoadingError extends ServerError {
  override name = "LoraLoadingError";
}

/** The device had no memory for this request. */
export class ResourceExhaustedError extends ServerError {
  override name = "ResourceExhaustedError";
}

/** The queue was still full when the client's budget of waiting ended. */
export class QueueFullError extends ServerError {
  override name = "QueueFullError";
}

/** The server's broker could not be reached. */
export class QueueUnavailableError extends ServerError {
  override name = "QueueUnavailableError";
}

/** The server had not read its catalogue yet. */
export class NotReadyError extends ServerError {
  override name = "NotReadyError";
}

/** The server was leaving, and no other took its place. */
export class ShuttingDownError extends ServerError {
  override name = "ShuttingDownError";
}

/** The request's own deadline passed. */
export class RequestTimeoutError extends ServerError {
  override name = "RequestTimeoutError";
}

export type ErrorClass = new (message: string, facts?: ErrorFacts) => SIEError;

/** Every code of the server and its class. */
export const ERRORS_BY_CODE: Readonly<Record<string, ErrorClass>> = Object.freeze({
  INVALID_INPUT: InvalidInputError,
  UNAUTHENTICATED: AuthenticationError,
  PERMISSION_DENIED: PermissionDeniedError,
  POOL_OPERATION_FORBIDDEN: PoolOperationForbiddenError,
  NOT_FOUND: NotFoundError,
  MODEL_NOT_FOUND: ModelNotFoundError,
  POOL_NOT_FOUND: PoolNotFoundError,
  METHOD_NOT_ALLOWED: MethodNotAllowedError,
  BUNDLE_CONFLICT: BundleConflictError,
  POOL_CONFLICT: PoolConflictError,
  CONTENT_CONFLICT: ContentConflictError,
  PAYLOAD_TOO_LARGE: PayloadTooLargeError,
  UNSUPPORTED_MEDIA_TYPE: UnsupportedMediaTypeError,
  VALIDATION_ERROR: ValidationFailedError,
  IDEMPOTENCY_MISMATCH: IdempotencyMismatchError,
  RATE_LIMITED: RateLimitedError,
  ALL_ITEMS_FAILED: AllItemsFailedError,
  INFERENCE_ERROR: InferenceError,
  INTERNAL_ERROR: InternalServerError,
  MODEL_LOAD_FAILED: ModelLoadFailedError,
  LORA_LOAD_FAILED: LoraLoadFailedError,
  PROVISIONING: ProvisioningError,
  MODEL_LOADING: ModelLoadingError,
  LORA_LOADING: LoraLoadingError,
  RESOURCE_EXHAUSTED: ResourceExhaustedError,
  QUEUE_FULL: QueueFullError,
  QUEUE_UNAVAILABLE: QueueUnavailableError,
  NOT_READY: NotReadyError,
  SHUTTING_DOWN: ShuttingDownError,
  GATEWAY_TIMEOUT: RequestTimeoutError,
});

const BY_STATUS: Readonly<Record<number, ErrorClass>> = {
  401: AuthenticationError,
  403: PermissionDeniedError,
  404: NotFoundError,
  405: MethodNotAllowedError,
  409: ConflictError,
  413: PayloadTooLargeError,
  415: UnsupportedMediaTypeError,
  429: RateLimitedError,
};

/** The class for a server's code, else for its status. */
export function errorClass(code: string, status: number): ErrorClass {
  const own = Object.hasOwn(ERRORS_BY_CODE, code) ? ERRORS_BY_CODE[code] : undefined;
  return own ?? BY_STATUS[status] ?? (status >= 400 && status < 500 ? RequestError : ServerError);
}

/** An argument that cannot be sent. */
export function invalid(message: string, param = "", cause?: unknown): InvalidInputError {
  const details = param ? { param, reason: "schema" } : {};
  return new InvalidInputError(message, { code: "INVALID_INPUT", details, cause });
}

/** What a reply should have and has not is the server's fault. */
export function unreadable(part: string, requestId = "", cause?: unknown): ServerError {
  return new ServerError(`the server's reply could not be read: ${part}`, { status: 200, requestId, cause });
}
