export { SIEClient } from "./client.js";
export type { Pools } from "./cluster.js";
export type { Matrix, Numbers } from "./arrays.js";
export * from "./errors.js";
export type { Jobs, SubmitOptions, WaitOptions } from "./jobs.js";
export type { components } from "./openapi.js";
export type { CallOptions, ClientOptions, Progress, WebSocketClass, WebSocketLike } from "./options.js";
export type * from "./types.js";
export { VERSION } from "./version.js";
