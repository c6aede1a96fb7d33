"""Rows of the families of this package. Gateway, sidecar and clients read them too, so this imports nothing heavy."""

from collections.abc import Mapping
from types import MappingProxyType

from sie_contracts.models.families import Family, PublicClass

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "sound-encoder": Family(
            implementation="sie_models_readers.sound_encoder:SoundEncoder",
            described_by="sie_models_readers.folders:described",
            gives_vectors=True,
            ignores_text_beside_images=True,
        ),
        "document-reader": Family(
            implementation="sie_models_readers.document_reader:DocumentReader",
            described_by="sie_models_readers.folders:described",
            parameters=frozenset({"task", "max_new_tokens"}),
            transformers_class="VisionEncoderDecoderModel",
            ignores_text_beside_images=True,
            public_classes={
                "DonutAdapter": PublicClass(extracts=("entities", "data"), inputs=("image",)),
                "GlmOcrAdapter": PublicClass(extracts=("entities", "data"), inputs=("image",)),
                "LightOnOCRAdapter": PublicClass(extracts=("entities", "data"), inputs=("image",)),
                "PaddleOCRVLAdapter": PublicClass(extracts=("entities", "data"), inputs=("image",)),
                "SGLangVisionExtractAdapter": PublicClass(extracts=("entities", "data"), inputs=("image",)),
                "Florence2Adapter": PublicClass(extracts=("entities", "objects", "data"), inputs=("image",)),
            },
        ),
        "sound-reader": Family(
            implementation="sie_models_readers.sound_reader:SoundReader",
            described_by="sie_models_readers.folders:described",
            parameters=frozenset({"task", "language", "max_new_tokens", "word_times"}),
            transformers_class="WhisperForConditionalGeneration",
            ignores_text_beside_images=True,
            public_classes={
                "WhisperAdapter": PublicClass(extracts=("entities", "data"), inputs=("audio",)),
            },
        ),
        "docling": Family(
            implementation="sie_models_readers.documents.docling:DoclingModel",
            parameters=frozenset({"ocr", "tree"}),
            ignores_text_beside_images=True,
            extra="documents",
            is_package=True,
            public_classes={
                "DoclingAdapter": PublicClass(extracts=("data",), inputs=("document",), package="docling-slim"),
            },
        ),
    }
)
