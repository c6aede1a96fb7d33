"""API formats of other servers, as routes of a gateway.

rows            the table of the routes, and the plug-in with it
tei             Text Embeddings Inference
infinity        Infinity
cohere          Cohere: vectors of texts and images
contextual      Voyage: contextualised embeddings
ollama          Ollama: vectors and ranks; `ollama_models` has its routes about models
transcriptions  OpenAI: what is said in a recording
api/            bodies and replies

The formats of OpenAI, and of Jina's and Cohere's rerank, are in `sie_gateway/dialects`.
"""
