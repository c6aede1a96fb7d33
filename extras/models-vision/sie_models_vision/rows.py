"""Rows of the families of this package. Gateway, sidecar and clients read them too, so this imports nothing heavy."""

from collections.abc import Mapping
from types import MappingProxyType

from sie_contracts.models.families import Family, PublicClass

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "dual-encoder": Family(
            implementation="sie_models_vision.dual_encoder:DualEncoder",
            described_by="sie_models_vision.folders:described",
            gives_vectors=True,
            ignores_text_beside_images=True,
            public_classes=dict.fromkeys(
                (
                    "CLIPAdapter",
                    "SiglipAdapter",
                ),
                PublicClass(inputs=("text", "image")),
            ),
        ),
        "vision-language": Family(
            implementation="sie_models_vision.vision_language:VisionLanguage",
            overflowing=frozenset({"colpali"}),  # its language model is a Gemma
            described_by="sie_models_vision.folders:described",
            gives_vectors=True,
            ignores_text_beside_images=True,
            takes_lora=True,
            public_classes=dict.fromkeys(
                (
                    "ColPaliAdapter",
                    "ColQwen2Adapter",
                    "NemoColEmbedAdapter",
                ),
                PublicClass(inputs=("text", "image"), is_complete=False),
            ),
        ),
        "multimodal-encoder": Family(
            implementation="sie_models_vision.vision_language:VisionLanguage",
            described_by="sie_models_vision.folders:described",
            gives_vectors=True,
            takes_lora=True,
            ends_instruction=True,
            public_classes={
                "Qwen3VLEmbeddingAdapter": PublicClass(inputs=("text", "image"), is_complete=False),
            },
        ),
        "multimodal-reranker": Family(
            implementation="sie_models_vision.vision_language:VisionLanguage",
            reads_answer=True,
            public_classes={
                "Qwen3VLRerankerAdapter": PublicClass(inputs=("text", "image"), is_complete=False),
            },
        ),
        "detector": Family(
            implementation="sie_models_vision.detector:Detector",
            described_by="sie_models_vision.folders:described",
            parameters=frozenset({"threshold", "box_threshold", "text_threshold", "score_threshold"}),
            transformers_class="AutoModelForZeroShotObjectDetection",
            ignores_text_beside_images=True,
            needs_labels=True,
            public_classes=dict.fromkeys(
                (
                    "GroundingDINOAdapter",
                    "Owlv2Adapter",
                ),
                PublicClass(extracts=("objects",), inputs=("image",)),
            ),
        ),
    }
)
