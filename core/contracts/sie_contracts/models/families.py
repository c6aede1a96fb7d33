"""Model families: a table with one row per family. A row has everything that gateway, sidecar, adapter and CLI must
know about the family.

    family of an entry ──► row ──► parameters, LoRA, labels (gateway)
                                   class, files, tokens around a text (adapter)

To add a family, write a file with its class in `sie_adapter` and a row here (docs/families.md).

A family from another package has no row. The entry point `sie.adapters` names its class. The family checks the
parameters that `option_values` does not check, and may read any file of a model's folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TEXT_ENCODER = "sie_adapter.families.text_encoder:TextEncoder"


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
    files: tuple[str, ...] = ()  # patterns of the files that a load reads; empty: the default patterns
    reads_scales: bool = False  # an output schema may have integers with bounds, among which the model chooses
    # pip extra of sie-cluster that the family needs; `built-in` in a bundle means the families that need no extra
    extra: str = ""
    is_package: bool = False  # a model of the family is the Python package that `weights.package` names


# options of the families whose models fill an output schema and accept any label
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
            implementation="sie_adapter.extractors.gliner:GlinerModel",
            parameters=frozenset(
                {"threshold", "flat_ner", "multi_label", "merge_adjacent_entities", "precompute_labels"}
            ),
            config_file="gliner_config.json",
            needs_labels=True,
            has_pickled_weights=True,
        ),
        "gliner-relations": Family(
            implementation="sie_adapter.extractors.gliner_relations:GlinerRelationModel",
            parameters=frozenset({"threshold", "flat_ner", "multi_label", "relation_labels", "relation_threshold"}),
            config_file="gliner_config.json",
            needs_labels=True,
            has_pickled_weights=True,
        ),
        "gliner2": Family(
            implementation="sie_adapter.extractors.gliner2:Gliner2Model",
            parameters=frozenset({"threshold", "multi_label", "task", "relation_labels", "relation_threshold"})
            | _ANSWERS,
            needs_labels=True,
            relates_alone=True,
        ),
        "glirel": Family(
            implementation="sie_adapter.extractors.glirel:GlirelModel",
            parameters=frozenset({"threshold", "top_k"}),
            config_file="glirel_config.json",
            needs_labels=True,
            reads_mentions=True,
            has_pickled_weights=True,
        ),
        "gliclass": Family(
            implementation="sie_adapter.extractors.gliclass:GliclassModel",
            parameters=frozenset({"threshold", "multi_label", "examples"}) | _ANSWERS,
            needs_labels=True,
        ),
        "laya": Family(
            implementation="sie_adapter.extractors.laya:LayaModel",
            parameters=frozenset({"threshold", "multi_label", "task"}) | _ANSWERS,
            config_file="rl_agent_config.json",
            files=("rl_agent_config.json", "model.safetensors", "tokenizer/*", "encoder/*", "README.md"),
            needs_labels=True,
            reads_questions=True,
            reads_scales=True,
        ),
        "document-reader": Family(
            implementation="sie_adapter.readers.document_reader:DocumentReader",
            parameters=frozenset({"task", "max_new_tokens"}),
            transformers_class="VisionEncoderDecoderModel",
            ignores_text_beside_images=True,
        ),
        "sound-reader": Family(
            implementation="sie_adapter.readers.sound_reader:SoundReader",
            parameters=frozenset({"task", "language", "max_new_tokens", "word_times"}),
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
            parameters=frozenset({"ocr", "tree"}),
            ignores_text_beside_images=True,
            extra="documents",
            is_package=True,
        ),
    }
)
FOREIGN = Family(implementation="")  # row of all families from other packages


def row(family: str) -> Family:
    return FAMILIES.get(family, FOREIGN)
