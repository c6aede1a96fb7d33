"""Model families: one row has the facts of a family that gateway, sidecar, adapter and CLI need.

    family of an entry ──► row ──► parameters, LoRA, labels (gateway)
                                   class, files, tokens around a text (adapter)

To add a family, write a file with its class in `sie_adapter/families` and a row here (docs/families.md).

A family of another package has no row. The entry point `sie.adapters` names its class, the family checks its own
parameters, and any file of its folder may be read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TEXT_ENCODER = "sie_adapter.families.text_encoder:TextEncoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Facts of a family. `implementation`: `module:class` in the adapter, imported when a model of the family is first
    loaded. `parameters`: the options that only this family reads. `config_file`: a folder with this file, in addition
    to weights, has a model of the family. `transformers_class`: the class of transformers that loads the folder.
    """

    implementation: str
    parameters: frozenset[str] = frozenset()
    config_file: str = "config.json"
    transformers_class: str = "AutoModel"
    gives_vectors: bool = False  # the outputs are dense, sparse or multivector; scores are computed from them as well
    ignores_text_beside_images: bool = False  # if an input has a text and an image or a sound, its text is not read
    reads_answer: bool = False  # the model is a decoder: the score is the probability of the next token
    takes_lora: bool = False
    needs_labels: bool = False  # each request must name labels
    needs_instruction: bool = False  # each extraction must have an instruction: the question to answer from the texts
    reads_mentions: bool = False  # the model finds relations between the `metadata.entities` of an item
    has_row_per_label: bool = False  # an input has one sequence per label
    ends_instruction: bool = False  # the family adds a full stop to an instruction that ends without punctuation
    reads_first_token: bool = False  # the tokenizer must put a token before each text
    separates_pairs: bool = False  # the tokenizer must put a token between two texts
    has_pickled_weights: bool = False  # pytorch_model.bin, read by torch's loader of plain tensors
    names_backbones: bool = False  # `config_file` names repositories of backbones; their files belong to the model
    extra: str = (
        ""  # extra of the distribution, for a separate environment; `built-in` of a bundle leaves the family out
    )
    is_package: bool = False  # a model is the installed package that `weights.package` names


# options of the families that answer schemas and score any label
_ANSWERS = frozenset({"output_schema", "label_groups", "label_thresholds"})

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "text-encoder": Family(
            implementation=TEXT_ENCODER,
            parameters=frozenset({"score_mode", "score_weights"}),
            gives_vectors=True,
            takes_lora=True,
        ),
        "cross-encoder": Family(
            implementation=TEXT_ENCODER,
            transformers_class="AutoModelForSequenceClassification",
            takes_lora=True,
            reads_first_token=True,
            separates_pairs=True,
        ),
        "decoder-reranker": Family(
            implementation=TEXT_ENCODER,
            transformers_class="AutoModelForCausalLM",
            reads_answer=True,
        ),
        "zero-shot-classifier": Family(
            implementation=TEXT_ENCODER,
            parameters=frozenset({"threshold", "multi_label", "hypothesis_template"}) | _ANSWERS,
            transformers_class="AutoModelForSequenceClassification",
            needs_labels=True,
            has_row_per_label=True,
            reads_first_token=True,
            separates_pairs=True,
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
        "dual-encoder": Family(
            implementation="sie_adapter.families.dual_encoder:DualEncoder",
            gives_vectors=True,
            ignores_text_beside_images=True,
        ),
        "sound-encoder": Family(
            implementation="sie_adapter.families.sound_encoder:SoundEncoder",
            gives_vectors=True,
            ignores_text_beside_images=True,
        ),
        "vision-language": Family(
            implementation="sie_adapter.families.vision_language:VisionLanguage",
            gives_vectors=True,
            ignores_text_beside_images=True,
            takes_lora=True,
        ),
        "multimodal-encoder": Family(
            implementation="sie_adapter.families.vision_language:VisionLanguage",
            gives_vectors=True,
            takes_lora=True,
            ends_instruction=True,
        ),
        "multimodal-reranker": Family(
            implementation="sie_adapter.families.vision_language:VisionLanguage",
            reads_answer=True,
        ),
        "pruner": Family(
            implementation=TEXT_ENCODER,
            parameters=frozenset({"prune_threshold", "highlight_threshold"}),
            transformers_class="AutoModelForSequenceClassification",
            needs_instruction=True,
            reads_first_token=True,
            separates_pairs=True,
        ),
        "gliner": Family(
            implementation="sie_adapter.families.gliner:GlinerModel",
            parameters=frozenset(
                {"threshold", "flat_ner", "multi_label", "merge_adjacent_entities", "precompute_labels"}
            ),
            config_file="gliner_config.json",
            needs_labels=True,
            has_pickled_weights=True,
            names_backbones=True,
        ),
        "gliner2": Family(
            implementation="sie_adapter.families.gliner2:Gliner2Model",
            parameters=frozenset({"threshold", "multi_label", "task"}) | _ANSWERS,
            needs_labels=True,
        ),
        "glirel": Family(
            implementation="sie_adapter.families.glirel:GlirelModel",
            parameters=frozenset({"threshold", "top_k"}),
            config_file="glirel_config.json",
            needs_labels=True,
            reads_mentions=True,
            has_pickled_weights=True,
            names_backbones=True,
        ),
        "gliclass": Family(
            implementation="sie_adapter.families.gliclass:GliclassModel",
            parameters=frozenset({"threshold", "multi_label", "examples"}) | _ANSWERS,
            needs_labels=True,
        ),
        "document-reader": Family(
            implementation="sie_adapter.readers.document_reader:DocumentReader",
            parameters=frozenset({"task", "max_new_tokens"}),
            transformers_class="VisionEncoderDecoderModel",
            ignores_text_beside_images=True,
        ),
        "sound-reader": Family(
            implementation="sie_adapter.readers.sound_reader:SoundReader",
            parameters=frozenset({"task", "language", "max_new_tokens"}),
            transformers_class="WhisperForConditionalGeneration",
            ignores_text_beside_images=True,
        ),
        "detector": Family(
            implementation="sie_adapter.detectors.detector:Detector",
            parameters=frozenset({"threshold", "box_threshold", "text_threshold", "score_threshold"}),
            transformers_class="AutoModelForZeroShotObjectDetection",
            ignores_text_beside_images=True,
            needs_labels=True,
        ),
        "docling": Family(
            implementation="sie_adapter.documents.docling:DoclingModel",
            parameters=frozenset({"ocr"}),
            ignores_text_beside_images=True,
            extra="documents",
            is_package=True,
        ),
    }
)
FOREIGN = Family(implementation="")  # row of a family of another package


def row(family: str) -> Family:
    return FAMILIES.get(family, FOREIGN)
