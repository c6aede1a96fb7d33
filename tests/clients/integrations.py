"""The integrations of the public SDK, called as their users do. A Python with one of them installed runs this file.

integrations.py NAME URL PNG MODEL... ──► one line for each public class and method that was called, or a traceback

The models are those that the server has. What needs another one is left out.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

DENSE = SPARSE = MULTIVECTOR = "test/m3"
CROSS, ENTITIES, CLASSES, IMAGES = "test/cross", "test/gliner", "test/zero-shot", "test/clip"
TEXTS = ["Ada Lovelace lived in London", "A cat sleeps on the sofa"]
LABELS = ["person", "city"]
WIDTH = 32  # the width of the test model's vectors


def is_vector(values: Any, width: int = WIDTH) -> bool:
    return len(values) == width and math.isclose(math.hypot(*map(float, values)), 1, rel_tol=1e-3)


def is_sparse(vector: Any) -> bool:
    return len(vector["indices"]) == len(vector["values"]) > 0 and all(value > 0 for value in vector["values"])


def is_matrix(rows: Any) -> bool:
    return len(rows) > 1 and all(is_vector(row) for row in rows)


def are_entities(entities: Any, text: str = TEXTS[0]) -> bool:
    """Return True if there are entities, and each is a part of the text with one of the labels."""
    fields = [entity if isinstance(entity, dict) else vars(entity) for entity in entities]
    return bool(fields) and all(
        text[entity["start"] : entity["end"]] == entity["text"] and entity["label"] in LABELS for entity in fields
    )


def are_classes(classes: Any) -> bool:
    fields = [
        classification if isinstance(classification, dict) else vars(classification) for classification in classes
    ]
    return {classification["label"] for classification in fields} == set(LABELS)


def is_sorted(scores: Any) -> bool:
    return len(set(scores)) == len(TEXTS) and list(scores) == sorted(scores, reverse=True)


def langchain(url: str, picture: Path, models: Set[str]) -> Iterator[tuple[str, bool]]:
    from langchain_core.documents import Document
    from sie_langchain import SIEEmbeddings, SIEExtractor, SIEReranker, SIESparseEncoder

    dense = SIEEmbeddings(base_url=url, model=DENSE)
    yield "SIEEmbeddings.embed_documents", all(map(is_vector, dense.embed_documents(TEXTS)))
    yield "SIEEmbeddings.embed_query", is_vector(dense.embed_query(TEXTS[0]))

    async def concurrent() -> tuple[Any, ...]:
        embedder = SIEEmbeddings(base_url=url, model=DENSE)
        reranker = SIEReranker(base_url=url, model=CROSS)
        results = (
            await embedder.aembed_documents(TEXTS),
            await embedder.aembed_query(TEXTS[0]),
            await reranker.acompress_documents([Document(text) for text in TEXTS], TEXTS[0]),
        )
        for owner in (embedder, reranker):
            await owner.async_client.close()
        return results

    async def extracted() -> Any:
        extractor = SIEExtractor(base_url=url, model=ENTITIES, labels=LABELS)
        results = await extractor.ainvoke(TEXTS[0])
        await extractor.async_client.close()
        return results["entities"]

    documents, query, ranked = asyncio.run(concurrent())
    yield "SIEEmbeddings.aembed_documents", all(map(is_vector, documents))
    yield "SIEEmbeddings.aembed_query", is_vector(query)
    yield "SIEReranker.acompress_documents", is_sorted([document.metadata["relevance_score"] for document in ranked])
    sparse = SIESparseEncoder(base_url=url, model=SPARSE)
    yield "SIESparseEncoder.encode_documents", all(map(is_sparse, sparse.encode_documents(TEXTS)))
    yield "SIESparseEncoder.encode_queries", all(map(is_sparse, sparse.encode_queries(TEXTS)))
    ranked = SIEReranker(base_url=url, model=CROSS).compress_documents([Document(text) for text in TEXTS], TEXTS[0])
    yield "SIEReranker.compress_documents", is_sorted([document.metadata["relevance_score"] for document in ranked])
    if ENTITIES in models:
        yield "SIEExtractor.ainvoke", are_entities(asyncio.run(extracted()))
        extractor = SIEExtractor(base_url=url, model=ENTITIES, labels=LABELS)
        yield "SIEExtractor.invoke", are_entities(extractor.invoke(TEXTS[0])["entities"])
    classifier = SIEExtractor(base_url=url, model=CLASSES, labels=LABELS)
    yield "SIEExtractor.invoke of classes", are_classes(classifier.invoke(TEXTS[0])["classifications"])


def haystack(url: str, picture: Path, models: Set[str]) -> Iterator[tuple[str, bool]]:
    import warnings

    import sie_haystack as sie
    from haystack import Document, Pipeline

    warnings.filterwarnings("ignore", "Mutating attribute")  # the library warns of code of the integration

    def documents() -> list[Document]:
        return [Document(content=text) for text in TEXTS]

    arguments = {"base_url": url, "model": DENSE}
    yield "SIETextEmbedder", is_vector(sie.SIETextEmbedder(**arguments).run(TEXTS[0])["embedding"])
    pipeline = Pipeline()
    pipeline.add_component("embedder", sie.SIEDocumentEmbedder(**arguments))
    embedded = pipeline.run({"embedder": {"documents": documents()}})["embedder"]["documents"]
    yield "SIEDocumentEmbedder in a pipeline", all(is_vector(document.embedding) for document in embedded)
    yield "SIESparseTextEmbedder", is_sparse(sie.SIESparseTextEmbedder(**arguments).run(TEXTS[0])["sparse_embedding"])
    sparse = sie.SIESparseDocumentEmbedder(**arguments).run(documents())["documents"]
    yield "SIESparseDocumentEmbedder", all(is_sparse(document.meta["_sparse_embedding"]) for document in sparse)
    tokens = sie.SIEMultivectorTextEmbedder(**arguments).run(TEXTS[0])["multivector_embedding"]
    yield "SIEMultivectorTextEmbedder", is_matrix(tokens)
    tokens = sie.SIEMultivectorDocumentEmbedder(**arguments).run(documents())["documents"]
    yield (
        "SIEMultivectorDocumentEmbedder",
        all(is_matrix(document.meta["_multivector_embedding"]) for document in tokens),
    )
    if IMAGES in models:
        embedder = sie.SIEImageEmbedder(base_url=url, model=IMAGES)
        images = embedder.run([str(picture), picture.read_bytes()])["embeddings"]
        yield "SIEImageEmbedder", all(is_vector(vector, len(images[0])) for vector in images)
    ranked = sie.SIERanker(base_url=url, model=CROSS).run(query=TEXTS[0], documents=documents())["documents"]
    yield "SIERanker", is_sorted([document.meta["score"] for document in ranked])
    if ENTITIES in models:
        entities = sie.SIEExtractor(base_url=url, model=ENTITIES, labels=LABELS).run(TEXTS[0])["entities"]
        yield "SIEExtractor", are_entities(entities)
    classes = sie.SIEExtractor(base_url=url, model=CLASSES, labels=LABELS).run(TEXTS[0])["classifications"]
    yield "SIEExtractor of classes", are_classes(classes)


def llamaindex(url: str, picture: Path, models: Set[str]) -> Iterator[tuple[str, bool]]:
    import sie_llamaindex as sie
    from llama_index.core.schema import NodeWithScore, TextNode

    dense = sie.SIEEmbedding(base_url=url, model_name=DENSE)
    yield "SIEEmbedding.get_query_embedding", is_vector(dense.get_query_embedding(TEXTS[0]))
    yield "SIEEmbedding.get_text_embedding", is_vector(dense.get_text_embedding(TEXTS[0]))
    yield "SIEEmbedding.get_text_embedding_batch", all(map(is_vector, dense.get_text_embedding_batch(TEXTS)))

    async def concurrent() -> tuple[Any, ...]:
        embedder = sie.SIEEmbedding(base_url=url, model_name=DENSE)
        results = await embedder.aget_query_embedding(TEXTS[0]), await embedder.aget_text_embedding(TEXTS[0])
        await embedder.async_client.close()
        return results

    async def embedded() -> Any:
        embedder = sie.SIEMultiModalEmbedding(base_url=url, model_name=IMAGES)
        vector = await embedder.aget_image_embedding(str(picture))
        await embedder.async_client.close()
        return vector

    query, text = asyncio.run(concurrent())
    yield "SIEEmbedding.aget_query_embedding", is_vector(query)
    yield "SIEEmbedding.aget_text_embedding", is_vector(text)
    if IMAGES in models:
        images = sie.SIEMultiModalEmbedding(base_url=url, model_name=IMAGES)
        image = asyncio.run(embedded())
        width = len(image)
        vectors = {
            "aget_image_embedding": image,
            "get_query_embedding": images.get_query_embedding("cat"),
            "get_text_embedding_batch": images.get_text_embedding_batch(["a"])[0],
            "get_image_embedding": images.get_image_embedding(str(picture)),
            "get_image_embedding_batch": images.get_image_embedding_batch([str(picture)])[0],
        }
        for name, vector in vectors.items():
            yield f"SIEMultiModalEmbedding.{name}", is_vector(vector, width)
    sparse = sie.SIESparseEmbeddingFunction(base_url=url, model_name=SPARSE)
    for name in ("encode_queries", "encode_documents"):
        indices, values = getattr(sparse, name)(TEXTS)
        pairs = zip(indices, values, strict=True)
        yield (
            f"SIESparseEmbeddingFunction.{name}",
            all(is_sparse({"indices": positions, "values": weights}) for positions, weights in pairs),
        )
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    ranked = sie.SIENodePostprocessor(base_url=url, model=CROSS).postprocess_nodes(nodes, query_str=TEXTS[0])
    yield "SIENodePostprocessor.postprocess_nodes", is_sorted([node.score for node in ranked])
    if ENTITIES in models:
        tool = sie.create_sie_extractor_tool(base_url=url, model=ENTITIES, labels=LABELS)
        yield "create_sie_extractor_tool", are_entities(tool(text=TEXTS[0]).raw_output["entities"])
    tool = sie.create_sie_extractor_tool(base_url=url, model=CLASSES, labels=LABELS)
    yield "create_sie_extractor_tool of classes", are_classes(tool(text=TEXTS[0]).raw_output["classifications"])


def dspy(url: str, picture: Path, models: Set[str]) -> Iterator[tuple[str, bool]]:
    import dspy as library
    import sie_dspy as sie

    dense = sie.SIEEmbedder(base_url=url, model=DENSE)
    yield "SIEEmbedder of one", is_vector(dense(TEXTS[0]))
    yield "SIEEmbedder of several", all(map(is_vector, dense(TEXTS)))
    best = library.retrievers.Embeddings(corpus=TEXTS, embedder=dense, k=1)(TEXTS[0])
    yield "SIEEmbedder as a retriever's", best.passages == TEXTS[:1]
    sparse = sie.SIESparseEmbedder(base_url=url, model=SPARSE)
    yield "SIESparseEmbedder.embed_documents", all(map(is_sparse, sparse.embed_documents(TEXTS)))
    yield "SIESparseEmbedder.embed_query", is_sparse(sparse.embed_query(TEXTS[0]))
    yield "SIEReranker", is_sorted(sie.SIEReranker(base_url=url, model=CROSS)(query=TEXTS[0], passages=TEXTS).scores)
    if ENTITIES in models:
        entities = sie.SIEExtractor(base_url=url, model=ENTITIES, labels=LABELS)(text=TEXTS[0])
        yield "SIEExtractor", are_entities(entities.entities) and are_entities(entities.entities_dict)
    yield (
        "SIEExtractor of classes",
        are_classes(sie.SIEExtractor(base_url=url, model=CLASSES, labels=LABELS)(text=TEXTS[0]).classifications),
    )


def crewai(url: str, picture: Path, models: Set[str]) -> Iterator[tuple[str, bool]]:
    import sie_crewai as sie

    sparse = sie.SIESparseEmbedder(base_url=url, model=SPARSE)
    yield "SIESparseEmbedder.embed_documents", all(map(is_sparse, sparse.embed_documents(TEXTS)))
    yield "SIESparseEmbedder.embed_query", is_sparse(sparse.embed_query(TEXTS[0]))
    lines = sie.SIERerankerTool(base_url=url, model=CROSS).run(query=TEXTS[0], documents=TEXTS).splitlines()
    yield "SIERerankerTool", all(any(text in line for line in lines[1:]) for text in TEXTS)
    if ENTITIES in models:
        tool = sie.SIEExtractorTool(base_url=url, model=ENTITIES, labels=LABELS)
        yield "SIEExtractorTool", "Extracted entities:" in tool.run(text=TEXTS[0], labels=LABELS)
    tool = sie.SIEExtractorTool(base_url=url, model=CLASSES, labels=LABELS)
    yield "SIEExtractorTool of classes", "Classifications:" in tool.run(text=TEXTS[0], labels=LABELS)


def chroma(url: str, picture: Path, models: Set[str]) -> Iterator[tuple[str, bool]]:
    import chromadb
    import sie_chroma as sie

    dense = sie.SIEEmbeddingFunction(base_url=url, model=DENSE)
    yield "SIEEmbeddingFunction", all(map(is_vector, dense(TEXTS)))
    yield "SIEEmbeddingFunction.embed_query", all(map(is_vector, dense.embed_query(TEXTS)))
    sparse = sie.SIESparseEmbeddingFunction(base_url=url, model=SPARSE)
    for name, vectors in (("", sparse(TEXTS)), (".embed_query", sparse.embed_query(TEXTS))):
        yield f"SIESparseEmbeddingFunction{name}", all(vector and min(vector.values()) > 0 for vector in vectors)
    client = chromadb.EphemeralClient(chromadb.Settings(anonymized_telemetry=False))
    collection = client.create_collection("texts")
    collection.add(ids=["0", "1"], documents=TEXTS, embeddings=dense(TEXTS))
    nearest = collection.query(query_embeddings=dense.embed_query(TEXTS[:1]), n_results=1)
    yield "a collection", nearest["ids"] == [["0"]]


def qdrant(url: str, picture: Path, models: Set[str]) -> Iterator[tuple[str, bool]]:
    import sie_qdrant as sie
    from qdrant_client import QdrantClient
    from qdrant_client.models import Distance, PointStruct, SparseVector, VectorParams

    dense = sie.SIEVectorizer(base_url=url, model=DENSE)
    vectors = dense.embed_documents(TEXTS)
    yield "SIEVectorizer.embed_documents", all(map(is_vector, vectors))
    query = dense.embed_query(TEXTS[0])
    yield "SIEVectorizer.embed_query", is_vector(query)
    outputs = ["dense", "sparse", "multivector"]
    named = sie.SIENamedVectorizer(base_url=url, model=DENSE, output_types=outputs)
    for name, vector in (("documents", named.embed_documents(TEXTS)[0]), ("query", named.embed_query(TEXTS[0]))):
        SparseVector(**vector["sparse"])
        right = is_vector(vector["dense"]) and is_sparse(vector["sparse"]) and is_matrix(vector["multivector"])
        yield f"SIENamedVectorizer.embed_{name}", right
    client = QdrantClient(":memory:")
    client.create_collection("texts", VectorParams(size=WIDTH, distance=Distance.COSINE))
    client.upsert("texts", [PointStruct(id=number, vector=vector) for number, vector in enumerate(vectors)])
    yield "a collection", [point.id for point in client.query_points("texts", query, limit=1).points] == [0]


def weaviate(url: str, picture: Path, models: Set[str]) -> Iterator[tuple[str, bool]]:
    import sie_weaviate as sie

    dense = sie.SIEVectorizer(base_url=url, model=DENSE)
    yield "SIEVectorizer.embed_documents", all(map(is_vector, dense.embed_documents(TEXTS)))
    yield "SIEVectorizer.embed_query", is_vector(dense.embed_query(TEXTS[0]))
    named = sie.SIENamedVectorizer(base_url=url, model=DENSE, output_types=["dense", "multivector"])
    for name, vector in (("documents", named.embed_documents(TEXTS)[0]), ("query", named.embed_query(TEXTS[0]))):
        yield f"SIENamedVectorizer.embed_{name}", is_vector(vector["dense"]) and is_matrix(vector["multivector"])
    if ENTITIES not in models:
        return
    arguments = {"labels": LABELS, "classify_model": CLASSES, "classify_labels": LABELS}

    def is_enriched(documents: Any) -> bool:
        return [document.properties["text"] for document in documents] == TEXTS and all(
            is_vector(document.vector) and document.entities and are_classes(document.classifications)
            for document in documents
        )

    with sie.SIEDocumentEnricher(url, DENSE, extract_model=ENTITIES, **arguments) as enricher:
        yield "SIEDocumentEnricher.enrich", is_enriched(enricher.enrich(TEXTS))
        parts = list(enricher.enrich_iter(TEXTS, batch_size=1))
        yield (
            "SIEDocumentEnricher.enrich_iter",
            len(parts) == 2 and is_enriched([document for part in parts for document in part]),
        )
        yield "SIEDocumentEnricher.enrich_query", is_vector(enricher.enrich_query(TEXTS[0]))

    async def concurrent() -> tuple[Any, ...]:
        async with sie.SIEDocumentEnricher(url, DENSE, extract_model=ENTITIES, **arguments) as client:
            parts = [part async for part in client.aenrich_iter(TEXTS, batch_size=1)]
            return await client.aenrich(TEXTS), parts, await client.aenrich_query(TEXTS[0])

    whole, parts, query = asyncio.run(concurrent())
    yield "SIEDocumentEnricher.aenrich", is_enriched(whole)
    yield "SIEDocumentEnricher.aenrich_iter", is_enriched([document for part in parts for document in part])
    yield "SIEDocumentEnricher.aenrich_query", is_vector(query)


def lancedb(url: str, picture: Path, models: Set[str]) -> Iterator[tuple[str, bool]]:
    import lancedb as library
    import sie_lancedb as sie
    from lancedb.embeddings import get_registry
    from lancedb.index import FTS
    from lancedb.pydantic import LanceModel, MultiVector, Vector

    dense = get_registry().get("sie").create(base_url=url, model=DENSE)
    tokens = get_registry().get("sie-multivector").create(base_url=url, model=MULTIVECTOR)
    yield "SIEEmbeddingFunction.ndims", dense.ndims() == WIDTH
    yield "SIEMultiVectorEmbeddingFunction.ndims", tokens.ndims() == WIDTH
    yield (
        "SIEMultiVectorEmbeddingFunction.compute_query_embeddings",
        is_matrix(tokens.compute_query_embeddings("a b")[0]),
    )

    class Row(LanceModel):  # type: ignore[misc]
        id: int
        text: str = dense.SourceField()
        vector: Vector(WIDTH) = dense.VectorField()  # type: ignore[valid-type]

    class Page(LanceModel):  # type: ignore[misc]
        text: str = tokens.SourceField()
        vector: MultiVector(WIDTH) = tokens.VectorField()  # type: ignore[valid-type]

    with tempfile.TemporaryDirectory() as folder:
        database = library.connect(folder)
        table = database.create_table("rows", schema=Row)
        table.add([{"id": number, "text": text} for number, text in enumerate(TEXTS)])
        yield "SIEEmbeddingFunction as a table's", table.search(TEXTS[0]).limit(1).to_list()[0]["id"] == 0
        pages = database.create_table("pages", schema=Page)
        vectors = tokens.compute_source_embeddings(TEXTS)
        pages.add([{"text": text, "vector": vector} for text, vector in zip(TEXTS, vectors, strict=True)])
        nearest = pages.search(tokens.compute_query_embeddings(TEXTS[0])[0]).limit(1).to_list()
        yield "SIEMultiVectorEmbeddingFunction.compute_source_embeddings", nearest[0]["text"] == TEXTS[0]
        ranked = table.search(TEXTS[0]).rerank(sie.SIEReranker(base_url=url, model=CROSS)).to_list()
        yield "SIEReranker.rerank_vector", is_sorted([row["_relevance_score"] for row in ranked])
        table.create_index("text", config=FTS())
        mixed = table.search(query_type="hybrid").vector(dense.compute_query_embeddings(TEXTS[0])[0]).text("cat Ada")
        ranked = mixed.rerank(sie.SIEReranker(base_url=url, model=CROSS)).to_list()
        yield "SIEReranker.rerank_hybrid", is_sorted([row["_relevance_score"] for row in ranked])
        ranked = table.search("cat Ada", query_type="fts").rerank(sie.SIEReranker(base_url=url, model=CROSS)).to_list()
        yield "SIEReranker.rerank_fts", is_sorted([row["_relevance_score"] for row in ranked])
        if ENTITIES not in models:
            return
        extractor = sie.SIEExtractor(base_url=url, model=ENTITIES)
        yield "SIEExtractor.extract", are_entities(extractor.extract(TEXTS, labels=LABELS)[0])
        extractor.enrich_table(table, source_column="text", target_column="entities", labels=LABELS, id_column="id")
        yield "SIEExtractor.enrich_table", are_entities(table.to_arrow()["entities"][0].as_py())


def mcp(url: str, picture: Path, models: Set[str]) -> Iterator[tuple[str, bool]]:
    """Call two of eight tools: those that need neither text generation nor a model that the test cluster lacks."""
    names_of_models = dict.fromkeys(("ENCODE", "RERANK", "CAPTION", "DOCLING", "VLOCR"), "test/none")
    names_of_models |= {"EXTRACT": ENTITIES, "PII": ENTITIES, "ENCODE": DENSE, "RERANK": CROSS, "EMBED": IMAGES}
    os.environ |= {f"SIE_MCP_{name}_MODEL": model for name, model in names_of_models.items()}
    os.environ["SIE_BASE_URL"] = url
    logging.disable(logging.INFO)
    from mcp.shared.memory import create_connected_server_and_client_session
    from sie_mcp.config import MCPConfig
    from sie_mcp.server import build_server

    image = base64.b64encode(picture.read_bytes()).decode()
    text = base64.b64encode(TEXTS[0].encode()).decode()
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    calls = {
        "extract_entities": {"labels": LABELS, "content": TEXTS[0]},
        "redact_pii": {"content_base64": text, "labels": LABELS},
        "docs_to_markdown": {"document_base64": text, "filename": "a.md", "engine": "docling"},
        "describe_image": {"image_base64": image},
        "answer_questions": {"documents": TEXTS, "questions": ["Who?"]},
        "summarize_document": {"content": TEXTS[0]},
        "extract_structured": {"content": TEXTS[0], "output_schema": schema},
        "generate_structured": {"prompt": "a city", "response_format": {"type": "json_object"}},
    }

    async def called() -> tuple[set[str], dict[str, Any]]:
        server = build_server(MCPConfig.from_env())
        async with create_connected_server_and_client_session(server._mcp_server) as session:
            names = {tool.name for tool in (await session.list_tools()).tools}
            return names, {name: await session.call_tool(name, arguments) for name, arguments in calls.items()}

    names, results = asyncio.run(called())
    yield "eight tools", names == set(calls)
    if ENTITIES in models:
        entities = results["extract_entities"]
        yield "extract_entities", not entities.isError and are_entities(entities.structuredContent["entities"])
        redacted = results["redact_pii"]
        yield "redact_pii", not redacted.isError and redacted.structuredContent["redacted_text"] != TEXTS[0]
    refused = {name: str(result.content) for name, result in results.items() if result.isError}
    for name in ("answer_questions", "summarize_document", "extract_structured", "generate_structured"):
        yield f"{name} is refused: no generation", "this server does not generate text" in refused[name]
    for name in ("docs_to_markdown", "describe_image"):
        yield f"{name} is refused: no such model", "no model named 'test/none'" in refused[name]


INTEGRATIONS: dict[str, Callable[[str, Path, Set[str]], Iterator[tuple[str, bool]]]] = {
    function.__name__: function
    for function in (langchain, haystack, llamaindex, dspy, crewai, chroma, qdrant, weaviate, lancedb, mcp)
}


def main(name: str, url: str, picture: str, *models: str) -> int:
    wrong = 0
    for case, is_right in INTEGRATIONS[name](url, Path(picture), {*models}):
        print(f"{'ok' if is_right else 'WRONG'}: {case}", flush=True)
        wrong += not is_right
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
