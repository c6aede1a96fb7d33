"""Model families: one row says what gateway, sidecar, adapter and CLI have to know of a family.

    family of an entry ──► row ──► parameters, LoRA, labels (gateway)
                                   class, files, tokens around a text (adapter)

To add one: a file with its class in `sie_adapter/families`, and a row here (docs/families.md).

A family of another package has no row: the entry point `sie.adapters` names its class, it checks its own parameters,
and any file of its folder may be read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TEXT_ENCODER = "sie_adapter.families.text_encoder:TextEncoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`implementation`: `module:class` in the adapter, imported when a model of the family is first loaded.
    `parameters`: the options that only this family reads.
    `config_file`: the file that makes a folder one of its models, beside weights.
    `transformers_class`: the class of transformers that is made from the folder.
    """

    implementation: str
    parameters: frozenset[str] = frozenset()
    config_file: str = "config.json"
    transformers_class: str = "AutoModel"
    gives_vectors: bool = False  # dense, sparse or multivector, from which scores are computed as well
    ignores_text_beside_images: bool = False  # or beside a sound: of an input that has both, only these are read
    reads_answer: bool = False  # the score is the probability of the next token: a decoder
    takes_lora: bool = False
    needs_labels: bool = False  # in each request
    needs_instruction: bool = False  # in each extraction: what the texts are read for
    reads_mentions: bool = False  # `metadata.entities` of an item, between which it looks for relations
    has_row_per_label: bool = False  # an input is as many sequences as there are labels
    ends_instruction: bool = False  # with a full stop, if it ends without a mark
    reads_first_token: bool = False  # so the tokenizer has to put one before each text
    separates_pairs: bool = False  # so the tokenizer has to put a token between two texts
    has_pickled_weights: bool = False  # pytorch_model.bin, read by torch's loader of plain tensors
    names_backbones: bool = False  # by repository in `config_file`, whose files belong to the model
    extra: str = (
        ""  # of the distribution, for an environment of its own, so `built-in` of a bundle leaves the family out
    )
    is_package: bool = False  # a model is the installed package that `weights.package` names


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
            parameters=frozenset({"threshold", "multi_label", "hypothesis_template"}),
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
            parameters=frozenset({"threshold"}),
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
            parameters=frozenset({"threshold", "multi_label"}),
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
FOREIGN = Family(implementation="")  # of another package


def row(family: str) -> Family:
    return FAMILIES.get(family, FOREIGN)
