import { test } from "node:test";
import { WebSocket } from "ws";
import type { WebSocketClass } from "../src/index.js";
import { suite } from "./suite.js";

const baseUrl = process.env["SIE_URL"];
if (!baseUrl) throw new Error("SIE_URL: expected the URL of a server with the models of the suite");
for (const [name, run] of Object.entries(suite({ baseUrl, webSocket: WebSocket as unknown as WebSocketClass }))) test(name, run);
