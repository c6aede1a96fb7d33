"""Vectors of a graph equal sentence-transformers' on the same folder, and a LoRA finds torch's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity import test_lora
from parity.device import SIXTEEN
from parity.table import ParityTable
from parity.test_dense import ALL, check
from parity.test_lora import Folders, base, engine, root  # noqa: F401  fixtures
from selection import long_but
from support.parity import References, Serve

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.errors import LoraLoadFailed, ModelLoadFailed

# PEFT reads this attribute of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
# architectures that OpenVINO does not compute: functions make their masks, or tables are changed in place
NO_GRAPH = ("gemma3 bidirectional", "embeddinggemma", "llama longrope")
GRAPHS = [
    ("bert", "float32"),
    ("bert", SIXTEEN),
    ("modernbert", "float32"),
    ("qwen3 causal", "float32"),
    ("qwen2 sliding", "float32"),
]


@pytest.mark.parametrize(("name", "precision"), long_but([case for case in ALL if case[0] not in NO_GRAPH], GRAPHS))
def test_the_vectors_of_a_graph_equal_the_reference(
    name: str, precision: str, serve: Serve, references: References, table: ParityTable
) -> None:
    """OpenVINO runs every architecture but those of NO_GRAPH."""
    served = serve(name, precision, engine="openvino")
    check(name, precision, served, references, table, path="graph")


@pytest.mark.parametrize("name", NO_GRAPH)
def test_what_has_no_right_graph_says_so(name: str, serve: Serve) -> None:
    with pytest.raises(ModelLoadFailed, match=r"load\.engine is openvino: "):
        serve(name, "float32", engine="openvino")


def test_a_lora_that_does_not_fit_loads_no_second_copy_of_the_weights(
    engine: AdapterEngine,  # noqa: F811
    base: Folders,  # noqa: F811
    root: Path,  # noqa: F811
) -> None:
    """A model that runs as a graph needs torch's weights for a LoRA."""
    load = {"precision": "float32", "engine": "openvino"}
    served = test_lora.serve(engine, base("bert"), id="lora/compiled", load=load)
    before = served.weights.memory_bytes
    good = test_lora.trained(base("bert"), root / "of-the-compiled", ["query"])
    for change in (test_lora._layer, test_lora._shape):
        with pytest.raises(LoraLoadFailed):
            served.load(test_lora.edited(good, root / f"of-the-compiled{change.__name__}", change))
        assert served.weights.memory_bytes == before
    served.load(good)
    assert served.weights.memory_bytes > before
