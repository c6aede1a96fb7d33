"""The public HTTP API: each body and each reply as a struct, from which the OpenAPI document is generated.

    shapes        types that several files share, and how a field takes one of several shapes
    inference     encode, score and extract
    dialects      OpenAI, Jina, Voyage, Cohere, Infinity
    tei           Text Embeddings Inference
    batches       files and batches of OpenAI
    jobs          jobs on whole files
    models        models and aliases
    residency     loads and unloads of models
    operations    pools, health, scaling
    dead_letters  dead letters, and the caller's own scopes
    views         views of the console
    configs       the catalogue, at gateways and at the config service
    faults        errors

A field that may be absent has the type `... | UnsetType`. `EXAMPLE` of a struct appears in the document, and tests
check it against the schema. Parsers of bodies read exactly these fields, which a test compares.
"""
