/** Names of the schemas of replies, from the OpenAPI document of the gateway. */

import type { components } from "sie-client";

type Schemas = components["schemas"];

export type Model = Schemas["ModelInfo"];
export type ModelPage = Schemas["Models"];
export type Cluster = Schemas["ClusterView"];
export type Placement = Schemas["PlacementView"];
export type PlacedModel = Schemas["PlacedModel"];
export type DoctorReport = Schemas["DoctorReport"];
export type History = Schemas["History"];
export type SlowRequest = Schemas["SlowRequest"];
export type SlowRequests = Schemas["SlowRequests"];
export type RequestLog = Schemas["RequestLog"];
export type DeadLetterPage = Schemas["DeadLetterPage"];
export type Replayed = Schemas["Replayed"];
export type ReplayedAll = Schemas["ReplayedAll"];
export type Purged = Schemas["Purged"];
export type Whoami = Schemas["Whoami"];
export type ModelHistory = Schemas["ModelHistory"];
export type ModelResidency = Schemas["ModelResidency"];
export type ModelDocument = Schemas["ModelDocument"];
export type WrittenConfig = Schemas["Written"];
export type Token = Schemas["TeiToken"];
export type Usage = Schemas["ItemUsage"];
export type Entity = Schemas["Entity"];
export type DetectedObject = Schemas["DetectedObject"];
export type Relation = Schemas["Relation"];
export type Chunk = Schemas["EncodedChunk"];
export type Score = Schemas["ScoredItem"];

/** A result of encode or extract for one input. */
export type ItemResult = Schemas["EncodedItem"] & Partial<Schemas["ExtractedItem"]>;
/** The reply of any verb: `items` of encode and extract, `scores` of score. */
export type Reply = Omit<Schemas["Encoded"], "items"> & { items?: ItemResult[]; scores?: Score[] };
