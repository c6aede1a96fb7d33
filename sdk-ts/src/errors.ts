// Errors that a call may throw. The Python client has the same tree of classes (sdk/sie_client/errors.py).

/** Fields of an error, see SIEError. */
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
 * Base of all errors of the client. `code`: the server's error code, empty if it sent none. `status`: the HTTP status, 0
 * if there was no response. `details`: all fields of the error in the body. `retryable`: the same request may succeed
 * later. `requestId`: id of the request in the server's logs.
 */
export class SIEError extends Error {
  override name = "SIEError";
  readonly code: string;
  readonly status: number;
  readonly requestId: string;
  readonly retryable: boolean;
  readonly retryAfterMs: number | undefined;
  readonly details: Record<string, unknown>;
  /** True if an attempt got no answer: the server may have run the request. */
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

  /** Return the server's reason, which says more than the code; empty if it sent none. */
  get reason(): string {
    return stringOrEmpty(this.details["reason"]);
  }

  /** Return the path of the invalid field in the request; empty if the error is not about a field. */
  get param(): string {
    return stringOrEmpty(this.details["param"]);
  }
}

function stringOrEmpty(value: unknown): string {
  return typeof value === "string" ? value : "";
}

/** The server could not be reached, or the connection broke before its answer. */
export class SIEConnectionError extends SIEError {
  override name = "SIEConnectionError";
}

/** The caller's AbortSignal ended the call. `cause` is the signal's reason. `name` is that of the error of `fetch`. */
export class SIEAbortError extends SIEError {
  override name = "AbortError";
}

/** The request must be changed before it can succeed, or, after RateLimitedError, sent later. */
export class RequestError extends SIEError {
  override name = "RequestError";
}

/** The body, a parameter or a file is invalid, or the model does not support it. */
export class InvalidInputError extends RequestError {
  override name = "InvalidInputError";
}

/** The token is missing, unknown, expired or revoked. */
export class AuthenticationError extends RequestError {
  override name = "AuthenticationError";
}

/** The token is valid but lacks the scope that the path requires, or the server does not allow the operation. */
export class PermissionDeniedError extends AuthenticationError {
  override name = "PermissionDeniedError";
}

/** The request exceeds a limit for reservations, or the pool is not a reservation, so it cannot be changed. */
export class PoolOperationForbiddenError extends PermissionDeniedError {
  override name = "PoolOperationForbiddenError";
}

/** The path, or the object that it names, does not exist. */
export class NotFoundError extends RequestError {
  override name = "NotFoundError";
}

/**
 * The model, profile or revision does not exist. `details` has `suggestions` for an unknown model, `profiles` for an
 * unknown profile, `revisions` for an unknown revision.
 */
export class ModelNotFoundError extends NotFoundError {
  override name = "ModelNotFoundError";
}

/** The pool does not exist, or its lease has ended. */
export class PoolNotFoundError extends NotFoundError {
  override name = "PoolNotFoundError";
}

/** The path does not support this method. */
export class MethodNotAllowedError extends RequestError {
  override name = "MethodNotAllowedError";
}

/** The request does not fit the present state of the server's objects. */
export class ConflictError extends RequestError {
  override name = "ConflictError";
}

/** The bundle does not serve the model. `details` has `compatible_bundles`. */
export class BundleConflictError extends ConflictError {
  override name = "BundleConflictError";
}

/** The name belongs to a pool that is not a reservation, or to a reservation of another key. */
export class PoolConflictError extends ConflictError {
  override name = "PoolConflictError";
}

/**
 * The object is in another state than the request needs: for example, another client has changed it. For a model,
 * `details` has `revision` and `diff`.
 */
export class ContentConflictError extends ConflictError {
  override name = "ContentConflictError";
}

/**
 * The body, one item or the reply is too large, or the call needs more tokens than the key may use in a minute.
 * `details` has `limit`.
 */
export class PayloadTooLargeError extends RequestError {
  override name = "PayloadTooLargeError";
}

/** The server accepts no body of this `Content-Type` or `Content-Encoding`. */
export class UnsupportedMediaTypeError extends RequestError {
  override name = "UnsupportedMediaTypeError";
}

/** The configuration is invalid. */
export class ValidationFailedError extends RequestError {
  override name = "ValidationFailedError";
}

/** The idempotency key was used earlier for a different request. */
export class IdempotencyMismatchError extends RequestError {
  override name = "IdempotencyMismatchError";
}

/**
 * A limit (tokens of the API key per minute, its uploads at once, or stored jobs and files) was reached for as long as
 * the client waited.
 */
export class RateLimitedError extends RequestError {
  override name = "RateLimitedError";
}

/** Every item of the request failed, for different reasons: see `details.errors`. `status` is 400, 500 or 503. */
export class AllItemsFailedError extends SIEError {
  override name = "AllItemsFailedError";
}

/** The server failed, sent an unreadable reply, or had no capacity for as long as the client waited. */
export class ServerError extends SIEError {
  override name = "ServerError";
}

/** The model could not compute this input. */
export class InferenceError extends ServerError {
  override name = "InferenceError";
}

/** The server has an internal fault. Its log has the details under `requestId`. */
export class InternalServerError extends ServerError {
  override name = "InternalServerError";
}

/** The model cannot be loaded. `details` has `error_class`, `attempts` and `permanent`. */
export class ModelLoadFailedError extends ServerError {
  override name = "ModelLoadFailedError";
}

/** The LoRA cannot be loaded. `details` has `lora_id`. */
export class LoraLoadFailedError extends ServerError {
  override name = "LoraLoadFailedError";
}

/** No worker became ready while the client waited. `details` has `gpu`, `bundle` and `estimated_wait_s`. */
export class ProvisioningError extends ServerError {
  override name = "ProvisioningError";
}

/** The model was not loaded while the client waited. */
export class ModelLoadingError extends ServerError {
  override name = "ModelLoadingError";
}

/** The LoRA was not loaded while the client waited. */
export class LoraLoadingError extends ServerError {
  override name = "LoraLoadingError";
}

/** A device, a store or another limited resource of the server was full for this request. */
export class ResourceExhaustedError extends ServerError {
  override name = "ResourceExhaustedError";
}

/** The queue stayed full, or the gateway stayed at a limit, for as long as the client waited. */
export class QueueFullError extends ServerError {
  override name = "QueueFullError";
}

/** The server could not use its broker or its payload store for as long as the client waited. */
export class QueueUnavailableError extends ServerError {
  override name = "QueueUnavailableError";
}

/**
 * The server had not read its catalogue or its keys yet, lacks a service that the request needs, or did not get a changed
 * model in time.
 */
export class NotReadyError extends ServerError {
  override name = "NotReadyError";
}

/** The server was shutting down, and no other server took its place. */
export class ShuttingDownError extends ServerError {
  override name = "ShuttingDownError";
}

/** The request was not finished within its deadline (`timeoutMs`). */
export class RequestTimeoutError extends ServerError {
  override name = "RequestTimeoutError";
}

/** Constructor of an error class. */
export type ErrorClass = new (message: string, facts?: ErrorFacts) => SIEError;

/** Error classes by the error code of the server. */
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

/** Return the class for an error code of the server, or for the HTTP status if the code is unknown. */
export function errorClass(code: string, status: number): ErrorClass {
  const byCode = Object.hasOwn(ERRORS_BY_CODE, code) ? ERRORS_BY_CODE[code] : undefined;
  return byCode ?? BY_STATUS[status] ?? (status >= 400 && status < 500 ? RequestError : ServerError);
}

/** Create the error for an argument that cannot be sent. */
export function invalid(message: string, param = "", cause?: unknown): InvalidInputError {
  const details = param ? { param, reason: "schema" } : {};
  return new InvalidInputError(message, { code: "INVALID_INPUT", details, cause });
}

/** Create the error for a reply that lacks `part` or has it in a wrong form. */
export function unreadable(part: string, requestId = "", cause?: unknown): ServerError {
  return new ServerError(`the server's reply could not be read: ${part}`, { status: 200, requestId, cause });
}
