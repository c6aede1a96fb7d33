"""Rows of the families of this package. Gateway, sidecar and clients read them too, so this imports nothing heavy."""

from collections.abc import Mapping
from types import MappingProxyType

from sie_contracts.models.families import ANSWERS, Family, PublicClass

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gliner": Family(
            implementation="sie_models_extract.gliner:GlinerModel",
            described_by="sie_models_extract.folders:described_by_package",
            parameters=frozenset(
                {"threshold", "flat_ner", "multi_label", "merge_adjacent_entities", "precompute_labels"}
            ),
            config_file="gliner_config.json",
            needs_labels=True,
            has_pickled_weights=True,
            names_backbones=True,
            public_classes=dict.fromkeys(
                (
                    "GLiNERAdapter",
                    "GLiNERBiAdapter",
                ),
                PublicClass(extracts=("entities",)),
            ),
        ),
        "gliner-relations": Family(
            implementation="sie_models_extract.gliner_relations:GlinerRelationModel",
            described_by="sie_models_extract.folders:described_by_package",
            parameters=frozenset({"threshold", "flat_ner", "multi_label", "relation_labels", "relation_threshold"}),
            config_file="gliner_config.json",
            needs_labels=True,
            has_pickled_weights=True,
            names_backbones=True,
            public_classes=dict.fromkeys(
                (
                    "GLiNERAdapter",
                    "GLiNERBiAdapter",
                ),
                PublicClass(extracts=("entities", "relations"), option="relation_threshold"),
            ),
        ),
        "gliner2": Family(
            implementation="sie_models_extract.gliner2:Gliner2Model",
            described_by="sie_models_extract.folders:described_by_package",
            parameters=frozenset({"threshold", "multi_label", "task", "relation_labels", "relation_threshold"})
            | ANSWERS,
            needs_labels=True,
            relates_alone=True,
            public_classes={
                "GLiNER2Adapter": PublicClass(extracts=("entities", "relations")),
                "GLiNER2EntitiesAdapter": PublicClass(extracts=("entities",)),
                "GLiNER2ClassificationAdapter": PublicClass(extracts=("classifications",)),
                "GLiNER2DecideAdapter": PublicClass(extracts=("classifications",)),
            },
        ),
        "glirel": Family(
            implementation="sie_models_extract.glirel:GlirelModel",
            parameters=frozenset({"threshold", "top_k"}),
            config_file="glirel_config.json",
            needs_labels=True,
            reads_mentions=True,
            has_pickled_weights=True,
            names_backbones=True,
            public_classes={
                "GLiRELAdapter": PublicClass(extracts=("relations",)),
            },
        ),
        "gliclass": Family(
            implementation="sie_models_extract.gliclass:GliclassModel",
            described_by="sie_models_extract.folders:described_by_package",
            parameters=frozenset({"threshold", "multi_label", "examples"}) | ANSWERS,
            needs_labels=True,
            public_classes={
                "GLiClassAdapter": PublicClass(extracts=("classifications",)),
            },
        ),
        "laya": Family(
            implementation="sie_models_extract.laya:LayaModel",
            described_by="sie_models_extract.folders:described_by_package",
            parameters=frozenset({"threshold", "multi_label", "task"}) | ANSWERS,
            config_file="rl_agent_config.json",
            files=("rl_agent_config.json", "model.safetensors", "tokenizer/*", "encoder/*", "README.md"),
            needs_labels=True,
            reads_questions=True,
            reads_scales=True,
            public_classes={
                "LayaAdapter": PublicClass(extracts=("classifications",)),
            },
        ),
    }
)
