"""Rows of this extra in the tables of routes (`of_extras`)."""

DOCUMENTED = """
    infer  POST /v1/contextualizedembeddings /rerank /api/rerank
    infer  POST /v1/embed /v2/embed /classify /v1/classify / /embed /embed_all
    infer  POST /embed_sparse /predict /similarity /tokenize /decode
    infer  POST /tei/org/name /tei/org/name/embed /tei/org/name/embed_all
    infer  POST /tei/org/name/embed_sparse /tei/org/name/predict
    infer  POST /tei/org/name/similarity /tei/org/name/tokenize /tei/org/name/decode /tei/org/name/rerank
    infer  POST /tei/org/name/invocations /tei/org/name/v1/embeddings /tei/org/name/embeddings
    infer  GET /info /tei/org/name/info /tei/org/name/health /tei/org/name/ping
    infer  POST /api/embed /api/embeddings /v1/audio/transcriptions /v1/audio/translations
    read   GET /api/tags /api/ps /api/version /models /models/org/name
    read   POST /api/show
"""
SILENT = """
    POST   /v1/contextualizedembeddings /rerank /v1/embed /v2/embed /v1/classify /classify
    POST   / /embed /embed_all /embed_sparse /predict /similarity /tokenize /decode
    POST   /tei/{model:path} /tei/{model:path}/embed /tei/{model:path}/embed_all /tei/{model:path}/embed_sparse
    POST   /tei/{model:path}/predict /tei/{model:path}/similarity /tei/{model:path}/tokenize
    POST   /tei/{model:path}/decode /tei/{model:path}/rerank
    POST   /tei/{model:path}/invocations /tei/{model:path}/v1/embeddings /tei/{model:path}/embeddings
    POST   /api/rerank /api/embed /api/embeddings /api/show /v1/audio/transcriptions /v1/audio/translations
    GET    /tei/{model:path}/health /tei/{model:path}/ping
    GET    /info /tei/{model:path}/info /api/tags /api/ps /api/version /models /models/{model:path}
"""
