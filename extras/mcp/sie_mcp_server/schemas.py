"""Arguments and answers of the tools. An agent reads their JSON Schemas, so each argument has a description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

TEXT_CHARS = 50_000
MAX_TEXTS = 64
MAX_DOCUMENTS = 100
MAX_LABELS = 64
MAX_TOP = 50
INLINE_BYTES = 2_800_000  # limit for a document in base64, because a request over HTTP has at most 4 MiB

Text = Annotated[str, Meta(min_length=1, max_length=TEXT_CHARS)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Model = Annotated[
    Name | None,
    Meta(description="Id of the model, as list_models shows it. Leave it out to use the default model of this server."),
]
Task = Literal["encode", "score", "extract"]
Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_TEXTS)]
Inputs = Annotated[Texts, Meta(description="The texts to work on.")]
Labels = Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=MAX_LABELS)]
TopN = Annotated[int, Meta(ge=1, le=MAX_TOP, description="The largest number of results. The best result comes first.")]
Page = Annotated[int, Meta(ge=1, le=1_000_000, description="The number of the page. The first page is 1.")]


class ToolArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of a tool."""


class EncodeArguments(ToolArguments, frozen=True, kw_only=True):
    texts: Inputs
    model: Model = None
    is_query: Annotated[
        bool, Meta(description="True if the texts are search queries, false if they are documents to search in.")
    ] = False
    dimensions: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)] | None,
        Meta(description="The length of the vectors, for models that allow shorter vectors."),
    ] = None
    values: Annotated[
        bool,
        Meta(description="True to get the numbers of the vectors, at most 2048 in all. Rarely useful."),
    ] = False


class SimilarityArguments(ToolArguments, frozen=True, kw_only=True):
    query: Annotated[Text, Meta(description="The text with which the others are compared.")]
    texts: Annotated[
        Texts | None, Meta(description="The texts to compare with `query`. Give either `texts` or `reference`.")
    ] = None
    reference: Annotated[
        Name | None,
        Meta(
            description="The reference in an earlier answer of encode. `query` is compared with the texts of that call."
        ),
    ] = None
    model: Model = None
    top_n: TopN = 10


class RerankArguments(ToolArguments, frozen=True, kw_only=True):
    query: Annotated[Text, Meta(description="The question or search query.")]
    documents: Annotated[
        list[Text], Meta(min_length=1, max_length=MAX_DOCUMENTS, description="The candidate texts to rank.")
    ]
    model: Model = None
    top_n: TopN = 10


class ExtractArguments(ToolArguments, frozen=True, kw_only=True):
    texts: Inputs
    labels: Annotated[
        Labels | None, Meta(description='What to find, in plain words, for example ["person", "invoice number"].')
    ] = None
    output_schema: Annotated[
        dict[str, Any] | None,
        Meta(description="A JSON Schema of the values to extract, in place of `labels`. Only some models accept it."),
    ] = None
    threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="The lowest score of a result, from 0 to 1. Results below it are left out."),
    ] = None
    model: Model = None


class RedactArguments(ToolArguments, frozen=True, kw_only=True):
    texts: Inputs
    kinds: Annotated[
        Labels | None, Meta(description='What to remove, for example ["person", "email", "phone number"].')
    ] = None
    style: Annotated[
        Literal["mask", "tag", "synthetic"],
        Meta(description="What replaces a value: stars, the name of its kind, or an invented value."),
    ] = "tag"
    model: Model = None


class DocumentArguments(ToolArguments, frozen=True, kw_only=True):
    path: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(description="The path of a file, in the folder of documents that this server may read."),
    ] = None
    file: Annotated[
        Annotated[str, Meta(pattern="^file-[A-Za-z0-9-]{1,64}$")] | None,
        Meta(description="The id of a file that was uploaded to the gateway with the same API key."),
    ] = None
    data: Annotated[
        Annotated[str, Meta(min_length=1, max_length=INLINE_BYTES)] | None,
        Meta(description="The content of the file in base64, for small files."),
    ] = None
    format: Annotated[
        Literal["csv", "html", "md", "txt"] | None,
        Meta(description="The format of a text file. Leave it out to let the server detect the format."),
    ] = None
    model: Model = None


class SearchArguments(ToolArguments, frozen=True, kw_only=True):
    collection: Annotated[Name, Meta(description="The name of the collection, as list_collections shows it.")]
    query: Annotated[Text, Meta(description="What to search for, in natural language.")]
    top_n: TopN = 5


class ListModelsArguments(ToolArguments, frozen=True, kw_only=True):
    task: Annotated[
        Task | None, Meta(description="List only models with this task. Models that rank have the task score.")
    ] = None
    page: Page = 1


class ListCollectionsArguments(ToolArguments, frozen=True, kw_only=True):
    pass


class ReadResultArguments(ToolArguments, frozen=True, kw_only=True):
    reference: Annotated[Name, Meta(description="The `reference` in an earlier answer.")]
    page: Page = 1


class ResultReference(Struct, kw_only=True):
    """A result that read_result returns in pages."""

    reference: str
    uri: str
    pages: int
    expires_in_s: int


class EncodeAnswer(Struct, kw_only=True):
    model: str
    count: int
    dimensions: int
    truncated: list[int]
    vectors: ResultReference
    values: list[list[float]] | None = None


class SimilarText(Struct, kw_only=True):
    index: int
    similarity: float


class SimilarityAnswer(Struct, kw_only=True):
    model: str
    results: list[SimilarText]


class RankedText(Struct, kw_only=True):
    index: int
    score: float


class RerankAnswer(Struct, kw_only=True):
    model: str
    results: list[RankedText]


class ExtractedText(Struct, kw_only=True, omit_defaults=True):
    """Entities and values of the text at `index`; `error` if the extraction failed."""

    index: int
    entities: list[dict[str, Any]] = []
    relations: list[dict[str, Any]] = []
    classifications: list[dict[str, Any]] = []
    data: dict[str, Any] = {}
    error: str = ""


class ExtractAnswer(Struct, kw_only=True):
    model: str
    results: list[ExtractedText]
    more: ResultReference | None = None


class RedactedText(Struct, kw_only=True, omit_defaults=True):
    """The text at `index` without the values. `replaced`: number of replaced values by kind."""

    index: int
    text: str = ""
    replaced: dict[str, int] = {}
    error: str = ""


class RedactAnswer(Struct, kw_only=True):
    model: str
    results: list[RedactedText]
    more: ResultReference | None = None


class DocumentAnswer(Struct, kw_only=True):
    """The first page of a document's Markdown. `more`: reference to all pages, if there are several."""

    model: str
    format: str
    document_pages: int
    is_complete: bool
    characters: int
    markdown: str
    more: ResultReference | None = None


class SearchResult(Struct, kw_only=True):
    id: str
    score: float
    fields: dict[str, Any]


class SearchAnswer(Struct, kw_only=True):
    collection: str
    results: list[SearchResult]
    more: ResultReference | None = None


class ModelLimits(Struct, kw_only=True, omit_defaults=True):
    id: str
    tasks: list[str]
    inputs: list[str]
    outputs: list[str]
    max_tokens: int
    dimensions: dict[str, int] = {}
    needs_labels: bool = False
    languages: list[str] = []
    license: str = ""
    description: str = ""


class ListModelsAnswer(Struct, kw_only=True):
    models: list[ModelLimits]
    page: int
    pages: int


class CollectionSummary(Struct, kw_only=True):
    name: str
    description: str


class ListCollectionsAnswer(Struct, kw_only=True):
    collections: list[CollectionSummary]


class ReadResultAnswer(Struct, kw_only=True):
    page: int
    pages: int
    text: str


def schema_of(kind: type[Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a struct. Its root is an object and not a `$ref`, as the protocol requires."""
    _, schemas = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    root = schemas.pop(kind.__name__)
    root.pop("title", None)
    return {**root, "$defs": schemas} if schemas else root
