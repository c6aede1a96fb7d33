"""Structs for the bodies and replies of the public HTTP API. The OpenAPI document is generated from these structs.

    shapes        types that several files share, and the schema of a field that accepts several types
    inference     encode, score, extract and redact
    dialects      OpenAI, vLLM, and the ranks of Jina, Cohere, NVIDIA and Mixedbread
    batches       files and batches of OpenAI
    jobs          jobs on whole files
    models        models and aliases
    residency     loads and unloads of models
    operations    pools, health, scaling
    dead_letters  dead letters, and the scopes of the caller's credential
    configs       routes of the catalogue, which gateways and the config service serve
    faults        errors

A field that may be absent has the type `... | UnsetType`. The OpenAPI document shows `EXAMPLE` of a struct. Tests check
that `EXAMPLE` fits the schema, and that the parser of a body reads exactly the fields of the struct.
"""
