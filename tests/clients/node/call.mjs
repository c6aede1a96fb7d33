// Public clients for Node, with one call each, like tests/clients/heavy.py for Python.
//
// call.mjs CLIENT URL KEY MODEL RETRIES INPUT... ──► one line of JSON: {"found": ...} or {"status": ..., "error": ...}

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createTogetherAI } from "@ai-sdk/togetherai";
import { OllamaEmbeddings } from "@langchain/ollama";
import { OpenAIEmbeddings } from "@langchain/openai";
import { embedMany, rerank } from "ai";
import { Ollama } from "ollama";

const CLIENTS = {
  async ollama(url, key, model, retries, inputs) {
    const client = new Ollama({ host: url, headers: { Authorization: `Bearer ${key}` } });
    const { embeddings } = await client.embed({ model: `${model}:latest`, input: inputs, keep_alive: "5m" });
    const { models } = await client.list();
    if (!models.some(({ name }) => name === `${model}:latest`)) throw new Error(`${model} is not listed`);
    const { version } = await client.version();
    const shown = await client.show({ model });
    if (!version || !shown.capabilities.includes("embedding")) throw new Error("no version or no capability");
    return embeddings;
  },

  async "ai-sdk"(url, key, model, retries, inputs) {
    const provider = createOpenAICompatible({ name: "sie", baseURL: `${url}/v1`, apiKey: key });
    const { embeddings } = await embedMany({
      model: provider.embeddingModel(model),
      values: inputs,
      maxRetries: retries,
    });
    return embeddings;
  },

  async "togetherai-rerank"(url, key, model, retries, [query, ...documents]) {
    const provider = createTogetherAI({ baseURL: `${url}/v1`, apiKey: key });
    const { ranking } = await rerank({ model: provider.reranking(model), query, documents, maxRetries: retries });
    return ranking.map(({ originalIndex, score }) => [originalIndex, score]);
  },

  async "langchain-ollama"(url, key, model, retries, inputs) {
    const headers = new Headers({ Authorization: `Bearer ${key}` });
    const embedder = new OllamaEmbeddings({ model, baseUrl: url, truncate: true, headers, maxRetries: retries });
    return embedder.embedDocuments(inputs);
  },

  async "langchain-openai"(url, key, model, retries, inputs) {
    const embedder = new OpenAIEmbeddings({
      model,
      apiKey: key,
      maxRetries: retries,
      configuration: { baseURL: `${url}/v1` },
    });
    return embedder.embedDocuments(inputs);
  },
};

const [client, url, key, model, retries, ...inputs] = process.argv.slice(2);
let said;
try {
  said = { found: await CLIENTS[client](url, key, model, Number(retries), inputs) };
} catch (error) {
  const cause = error.lastError ?? error.cause ?? error;
  said = { status: cause.status_code ?? cause.statusCode ?? cause.status ?? null, error: String(error.message) };
}
console.log(JSON.stringify(said));
