"""Model families: a table with one row per family. A row has everything that gateway, sidecar, adapter and CLI must
know about the family.

    family of an entry ──► row ──► parameters, LoRA, labels (gateway)
                                   class, files, tokens around a text (adapter)

    rows of the core (FAMILIES) + rows of packages, by the entry points `sie.families` ──► rows()

To add a family, write a file with its class in `sie_adapter` and a row here (docs/families.md). A package brings rows
by an entry point of the group `sie.families`: `module:attribute` of a map from names to rows, in a module that imports
neither torch nor a library of models, since gateway, sidecar and client read it too.

A family that only the entry point `sie.adapters` names has no row. The family checks the parameters that
`option_values` does not check, and may read any file of a model's folder.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sie_contracts import entry_points

ENTRY_POINTS = "sie.families"
TEXT_ENCODER = "sie_adapter.families.text_encoder:TextEncoder"


@dataclass(frozen=True, slots=True)
class PublicClass:
    """Class of the public server that a family replaces. `extracts`: outputs of the family for the task `extract`.
    `package`: the Python package that contains the model; empty for a model with weights. `is_complete`: a public model
    file has all values that an entry of this family needs; if false, the file lacks the prompts, which are copied from
    the entry that this catalogue has for the same model. `option`: the family replaces the class only in profiles with
    this runtime option; empty if in all profiles for which no other family has an option.
    """

    extracts: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("text",)
    package: str = ""
    is_complete: bool = True
    option: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Row of the table of model families. `implementation`: `module:class` in the adapter, imported when a model of the
    family is first loaded. `parameters`: request options that this family reads and some other families do not.
    `config_file`: name of the configuration file in a model's folder. `transformers_class`: the class of transformers
    that loads the folder.
    """

    implementation: str
    parameters: frozenset[str] = frozenset()
    config_file: str = "config.json"
    transformers_class: str = "AutoModel"
    gives_vectors: bool = False  # outputs may be dense, sparse or multivector; a score can be computed from them
    # the text of an input is not read if the input also has an image or a sound
    ignores_text_beside_images: bool = False
    reads_answer: bool = False  # the model is a decoder that scores: the score comes from the logits of its next token
    takes_lora: bool = False
    needs_labels: bool = False  # an extraction must name labels, or parameters that have labels, such as output_schema
    relates_alone: bool = False  # an extraction with `relation_labels` needs no other labels
    # an extraction must have an instruction, for example the question that the text answers
    needs_instruction: bool = False
    reads_mentions: bool = False  # the model finds relations between the entities in `metadata.entities` of an item
    has_row_per_label: bool = False  # each label of an input is a separate sequence in the batch
    reads_questions: bool = False  # each question about an input (`questions_of`) is a separate sequence in the batch
    ends_instruction: bool = False  # a full stop is added to an instruction that ends without punctuation
    # the tokenizer must put a special token, such as [CLS], before each text: the model reads the state of this token
    reads_first_token: bool = False
    separates_pairs: bool = False  # the tokenizer must put a special token, such as [SEP], between the texts of a pair
    # weights may be in pytorch_model.bin, which torch.load reads with weights_only=True
    has_pickled_weights: bool = False
    overflowing: frozenset[str] = frozenset()  # model types whose states are too large for float16
    names_backbones: bool = False  # `config_file` names hub repositories of backbones, whose files are downloaded too
    files: tuple[str, ...] = ()  # patterns of the files that a load reads; empty: the default patterns
    reads_scales: bool = False  # an output schema may have integers with bounds, among which the model chooses
    # pip extra of sie-cluster that the family needs; `built-in` in a bundle means the families that need no extra
    extra: str = ""
    is_package: bool = False  # a model of the family is the Python package that `weights.package` names
    # `module:function` that describes a model's folder for an inspection (`sie_adapter.loading.described`)
    described_by: str = ""
    # classes of the public server, by the names in its model files (`public_models`)
    public_classes: Mapping[str, PublicClass] = field(default_factory=dict)


# options of the families whose models fill an output schema and accept any label
ANSWERS = frozenset({"output_schema", "label_groups", "label_thresholds"})

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "text-encoder": Family(
            implementation=TEXT_ENCODER,
            parameters=frozenset({"score_mode", "score_weights"}),
            gives_vectors=True,
            takes_lora=True,
            public_classes=dict.fromkeys(
                (
                    "BGEM3Adapter",
                    "BGEM3FlagAdapter",
                    "BGEM3FlashAdapter",
                    "BertFlashAdapter",
                    "CandleEmbeddingAdapter",
                    "ColBERTAdapter",
                    "ColBERTModernBERTFlashAdapter",
                    "ColBERTRotaryFlashAdapter",
                    "GTESparseFlashAdapter",
                    "ModernBERTFlashAdapter",
                    "NomicFlashAdapter",
                    "PyTorchEmbeddingAdapter",
                    "Qwen2FlashAdapter",
                    "RoPEFlashAdapter",
                    "SGLangEmbeddingAdapter",
                    "SPLADEFlashAdapter",
                    "SentenceTransformerDenseAdapter",
                    "SentenceTransformerSparseAdapter",
                    "XLMRobertaFlashAdapter",
                ),
                PublicClass(),
            ),
        ),
        "cross-encoder": Family(
            implementation=TEXT_ENCODER,
            transformers_class="AutoModelForSequenceClassification",
            takes_lora=True,
            reads_first_token=True,
            separates_pairs=True,
            public_classes=dict.fromkeys(
                (
                    "BertFlashCrossEncoderAdapter",
                    "CrossEncoderAdapter",
                    "JinaFlashCrossEncoderAdapter",
                    "ModernBertFlashCrossEncoderAdapter",
                ),
                PublicClass(),
            ),
        ),
        "decoder-reranker": Family(
            implementation=TEXT_ENCODER,
            transformers_class="AutoModelForCausalLM",
            reads_answer=True,
            public_classes={
                "Qwen2FlashCrossEncoderAdapter": PublicClass(),
            },
        ),
        "zero-shot-classifier": Family(
            implementation=TEXT_ENCODER,
            parameters=frozenset({"threshold", "multi_label", "hypothesis_template"}) | ANSWERS,
            transformers_class="AutoModelForSequenceClassification",
            needs_labels=True,
            has_row_per_label=True,
            reads_first_token=True,
            separates_pairs=True,
            public_classes=dict.fromkeys(
                (
                    "NLIClassificationAdapter",
                    "NLIClassificationFlashAdapter",
                ),
                PublicClass(extracts=("classifications",)),
            ),
        ),
        "text-classifier": Family(
            implementation=TEXT_ENCODER,
            parameters=frozenset({"threshold", "raw_scores"}),
            transformers_class="AutoModelForSequenceClassification",
            reads_first_token=True,
        ),
        "token-classifier": Family(
            implementation=TEXT_ENCODER,
            parameters=frozenset({"threshold"}),
            transformers_class="AutoModelForTokenClassification",
        ),
        "static-embedding": Family(
            implementation="sie_adapter.families.static_embedding:StaticEmbedding",
            config_file="tokenizer.json",
            gives_vectors=True,
        ),
        "pruner": Family(
            implementation=TEXT_ENCODER,
            parameters=frozenset({"prune_threshold", "highlight_threshold"}),
            transformers_class="AutoModelForSequenceClassification",
            needs_instruction=True,
            reads_first_token=True,
            separates_pairs=True,
            public_classes={
                "StablebridgePrunerAdapter": PublicClass(extracts=("entities",)),
            },
        ),
    }
)
FOREIGN = Family(implementation="")  # row of all families from other packages


@functools.cache
def rows() -> Mapping[str, Family]:
    """Return the rows of all families: those of the core, then those of packages, by the names of their entry points. A
    name that an earlier table has keeps its first row. Rows that cannot be imported are left out and logged.
    """
    families = dict(FAMILIES)
    for table in entry_points.load(ENTRY_POINTS).objects.values():
        for name, family in table.items():
            families.setdefault(name, family)
    return MappingProxyType(families)


def row(family: str) -> Family:
    return rows().get(family, FOREIGN)
