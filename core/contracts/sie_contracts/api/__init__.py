"""The public HTTP API: each body and each reply as a struct, from which the OpenAPI document is generated.

    shapes      types that several files share, and how a field takes one of several shapes
    inference   encode, score and extract
    dialects    OpenAI, Jina, Voyage, Cohere, Infinity, Text Embeddings Inference
    models      models and aliases
    operations  pools, health, scaling
    views       what the console reads
    configs     the catalogue, at gateways and at the config service
    faults      errors

A field that may be absent has the type `... | UnsetType`. `EXAMPLE` of a struct stands in the document, and tests hold
it to the schema. Parsers of bodies read these fields and no others, which a test compares.
"""
