"""Choice of the engine of a model: the table of rules, and graphs that compute wrong states."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity.checkpoints import ARCHITECTURES, build
from safetensors.torch import load_file, save_file
from transformers import BertConfig, Gemma3TextConfig, ModernBertConfig

from sie_adapter.engine import engines
from sie_adapter.engine.engines import EngineFacts
from sie_adapter.families import text_encoder
from sie_adapter.families.text_encoder import TextEncoder
from sie_adapter.loading import certificate, loading
from sie_adapter.loading.loading import Loader
from sie_adapter.packed import backbone as backbones
from sie_adapter.packed.packing import Items, PackedBatch, Positions, pack
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.catalogue import Catalogue, fingerprint
from sie_contracts.models.entries import LoadOptions, ModelEntry, parse_entry
from sie_contracts.models.load_errors import load_failed
from sie_contracts.settings import Settings
from sie_engines import graph as graphs
from sie_engines.graph import GROUP_TOKENS, PASS_TOKENS, Graph, RowGroup, filled_length, groups, most_filling
from sie_store.weights import derived
from sie_store.weights.derived import DerivedFiles
from sie_store.weights.sources import WeightSources

pytest.importorskip("openvino")
TEXTS = EngineFacts("cpu", reads_text=True)
CPU = torch.device("cpu")


def installed(package: str) -> bool:
    return False


def absent(package: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("facts", "engine", "reason"),
    [
        (TEXTS, "openvino", "fastest for one text"),
        (replace(TEXTS, device="cuda"), "torch", "the device is cuda"),
        (replace(TEXTS, reads_text=False), "torch", "more than texts"),
        (replace(TEXTS, lora="org/lora"), "torch", "a LoRA"),
        (replace(TEXTS, is_limited=True), "torch", "RLIMIT_DATA limits"),
        (replace(TEXTS, hides_tokens=True, config=ModernBertConfig()), "torch", "windows"),
        (replace(TEXTS, attention="eager"), "torch", "SIE_ATTENTION_BACKEND"),
    ],
)
def test_the_first_rule_without_an_obstacle_decides(facts: EngineFacts, engine: str, reason: str) -> None:
    choice = engines.choose(None, facts, installed)
    assert (choice.engine, choice.demand) == (engine, "")
    assert reason in choice.reason


def test_a_missing_package_is_named_with_its_extra() -> None:
    choice = engines.choose(None, TEXTS, absent)
    assert choice.engine == "torch"
    assert "sie-cluster[openvino]" in choice.reason


@pytest.mark.parametrize(
    ("facts", "missing", "error_class", "says"),
    [
        (replace(TEXTS, device="cuda"), installed, "INCOMPATIBLE", "load.engine is openvino: the device is cuda"),
        (TEXTS, absent, "DEPENDENCY", "sie-cluster[openvino]"),
    ],
)
def test_an_engine_that_an_entry_demands_in_vain_is_refused(
    facts: EngineFacts, missing: Any, error_class: str, says: str
) -> None:
    with pytest.raises(ModelLoadFailed) as caught:
        engines.choose("openvino", facts, missing)
    assert caught.value.extras["error_class"] == error_class
    assert says in caught.value.message


def test_other_families_refuse_it_before_their_files_are_read() -> None:
    entry = entry_of(Path("absent"), "bert", {"engine": "openvino"})
    for family in ("dual-encoder", "gliner"):
        model = Catalogue.resolve_profile(msgspec.structs.replace(entry, family=family), "default", entry.id)
        for act in (loader_of(Path()).needed_bytes, loader_of(Path()).load):
            with pytest.raises(ModelLoadFailed, match="more than texts"):
                act(model)


def packed_of(lengths: list[int], vocabulary: int = 100) -> PackedBatch:
    counts = np.array(lengths, np.int64)
    ids = np.random.default_rng(1).integers(5, vocabulary, int(counts.sum()), dtype=np.int32)
    return pack(Items(counts, ids), np.arange(len(counts)), Positions())


def cost(row_groups: list[RowGroup]) -> int:
    return sum(PASS_TOKENS + group.rows * group.columns for group in row_groups)


@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=40),
    st.integers(1, 900),
    st.sampled_from([0, 7, 31, sys.maxsize]),
)
def test_groups_hold_every_sequence_once_and_few_rows_without_one(
    lengths: list[int], max_tokens: int, max_filling: int
) -> None:
    lengths.sort()
    row_groups = groups(np.array(lengths), max_tokens, max_filling)
    assert [group.start for group in row_groups] == [0, *(group.stop for group in row_groups)][:-1]
    assert row_groups[-1].stop == len(lengths)
    for group in row_groups:
        held = lengths[group.start : group.stop]
        assert 0 < len(held) <= group.rows <= 1.25 * len(held)
        assert group.rows == 1 or group.rows * group.columns <= GROUP_TOKENS
        assert group.columns == filled_length(held[-1], max_tokens, max_filling)
        assert group.columns <= max(held[-1], max_tokens)
        assert group.columns - held[0] <= max_filling
    for apart in range(1, len(lengths)):
        parts = (lengths[:apart], lengths[apart:])
        assert cost(row_groups) <= sum(cost(groups(np.array(part), max_tokens, max_filling)) for part in parts)


def test_what_fills_up_costs_less_than_a_pass_more() -> None:
    rows = {number: [group.rows for group in groups(np.full(number, 8), 512)] for number in (1, 7, 21, 64)}
    assert rows == {1: [1], 7: [7], 21: [24], 64: [64]}
    assert len({group.rows for number in range(1, 129) for group in groups(np.full(number, 8), 512)}) == 24
    assert groups(np.array([40, 48]), 512) == [RowGroup(0, 2, 2, 48)]
    assert groups(np.array([3, 500]), 512) == [RowGroup(0, 1, 1, 8), RowGroup(1, 2, 1, 512)]


def test_lengths_have_few_values_and_grow_by_little() -> None:
    assert all(length <= filled_length(length, 8192) <= max(length + 7, 1.5 * length) for length in range(1, 8193))
    assert len({filled_length(length, 512) for length in range(1, 513)}) == 4 + 14 + 8
    assert [filled_length(length, 90) for length in (1, 8, 16, 17, 33, 65, 87)] == [8, 8, 16, 24, 48, 80, 90]


def test_what_fills_up_a_text_of_a_model_with_windows_sees_the_text() -> None:
    filling = {
        most_filling(config)
        for config in (BertConfig(), ModernBertConfig(), ModernBertConfig(local_attention=8), Gemma3TextConfig())
    }
    assert filling == {sys.maxsize, 31, 1, 2047}
    lengths = np.array([17, 17, 18, 200, 500])
    assert groups(lengths, 512, 0) == [
        RowGroup(0, 2, 2, 17),
        RowGroup(2, 3, 1, 18),
        RowGroup(3, 4, 1, 200),
        RowGroup(4, 5, 1, 500),
    ]
    assert groups(lengths, 512, 31) == [RowGroup(0, 3, 3, 24), RowGroup(3, 4, 1, 208), RowGroup(4, 5, 1, 512)]


@pytest.fixture(autouse=True)
def derived_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The derived files are in the cache of each loader."""
    monkeypatch.setattr(derived, "FOLDER", "sie-derived")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "bert", ARCHITECTURES["bert"])


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "longrope", ARCHITECTURES["llama longrope"])


def entry_of(folder: Path, name: str, load: dict[str, Any]) -> ModelEntry:
    return parse_entry(
        {
            "id": f"toy/{folder.name}",
            "weights": {"path": str(folder)},
            "family": "text-encoder",
            "outputs": {"dense": ARCHITECTURES[name].width},
            "max_tokens": 128,
            "load": load,
        }
    )


def loader_of(cache: Path) -> Loader:
    return Loader(CPU, WeightSources(cache, False), Settings(local_cache=str(cache)))


def loaded(folder: Path, name: str, precision: str = "float32", cache: Path | None = None, **load: Any) -> TextEncoder:
    entry = entry_of(folder, name, {"precision": precision, **load})
    with tempfile.TemporaryDirectory(dir=folder.parent) as own:
        model = loader_of(cache or Path(own)).load(Catalogue.resolve_profile(entry, "default", entry.id))
    assert isinstance(model, TextEncoder)
    return model


def states(model: TextEncoder, packed: PackedBatch) -> torch.Tensor:
    with torch.inference_mode():
        return model.forward(packed)


def test_both_engines_give_the_same_states_alone_and_beside_others(bert: Path) -> None:
    graph, stock = loaded(bert, "bert"), loaded(bert, "bert", engine="torch")
    assert (graph.backbone.engine.engine, stock.backbone.engine.engine) == ("openvino", "torch")
    packed = packed_of([5, 64, 5, 9, 5, 31, 128])
    graph_states = states(graph, packed)
    torch.testing.assert_close(graph_states, states(stock, packed), atol=2e-5, rtol=1e-4)
    types = (np.arange(42) % 2).astype(np.uint8)
    hiding = Items(np.array([9, 33]), packed.ids[:42].astype(np.int32), types, np.array([5, 33]))
    for chosen in ([0, 1], [0], [1]):
        hidden = pack(hiding, np.array(chosen), Positions())
        torch.testing.assert_close(states(graph, hidden), states(stock, hidden), atol=2e-5, rtol=1e-4)
    for sequence in range(len(packed.order)):
        own = slice(int(packed.bounds[sequence]), int(packed.bounds[sequence + 1]))
        ids = packed.ids[own].astype(np.int32)
        alone = pack(Items(np.array([len(ids)]), ids), np.arange(1), Positions())
        torch.testing.assert_close(states(graph, alone), graph_states[own], atol=1e-5, rtol=1e-4)


def test_two_loads_give_equal_bits_and_so_do_threads(bert: Path) -> None:
    first, second = loaded(bert, "bert"), loaded(bert, "bert")
    packed = packed_of([17, 3, 40, 40, 90])
    expected = states(first, packed)
    assert torch.equal(expected, states(second, packed))
    outputs: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: outputs.append(states(first, packed))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 4
    assert all(torch.equal(expected, output) for output in outputs)


def test_an_architecture_that_does_not_convert_runs_on_torch(longrope: Path) -> None:
    model: Any = loaded(longrope, "llama longrope")
    assert model.engine_choice.engine == "torch"
    assert "not openvino: it cannot convert the model" in model.engine_choice.reason
    assert {parameter.device.type for parameter in model.backbone._model.parameters()} == {"cpu"}
    with pytest.raises(ModelLoadFailed, match=r"load\.engine is openvino: it cannot convert the model"):
        loaded(longrope, "llama longrope", engine="openvino")


@pytest.fixture(params=["_of_lanes", "_alone"])
def corrupted(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    corrupt(monkeypatch, request.param)


def corrupt(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make one copy of the graph return wrong states."""

    class Corrupted(Graph):
        def _run(self, packed: PackedBatch, compiled: Any) -> torch.Tensor:
            output = super()._run(packed, compiled)
            return output.roll(1, dims=1) if compiled is getattr(self, name) else output

    monkeypatch.setattr(graphs, "Graph", Corrupted)
    monkeypatch.setattr(backbones, "usable_cores", lambda: 2)


@pytest.mark.usefixtures("corrupted")
def test_a_graph_that_computes_otherwise_is_not_used(bert: Path) -> None:
    model: Any = loaded(bert, "bert")
    assert model.engine_choice.engine == "torch"
    assert "the states of the graph and those of the stock path have cosine" in model.engine_choice.reason
    packed = packed_of([5, 30])
    torch.testing.assert_close(states(model, packed), states(loaded(bert, "bert", engine="torch"), packed))
    with pytest.raises(ModelLoadFailed, match=r"load\.engine is openvino: the states of the graph"):
        loaded(bert, "bert", engine="openvino")


def test_a_model_that_fails_its_checks_on_a_graph_is_freed_before_torch_has_it(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify = certificate.certify
    checked: list[weakref.ref[Any]] = []
    left: list[Any] = []

    def failing_once(model: Any, *arguments: Any) -> Any:
        left.extend(earlier() for earlier in checked)
        checked.append(weakref.ref(model))
        if len(checked) == 1:
            raise load_failed("CERTIFICATE", "wrong numbers")
        return certify(model, *arguments)

    monkeypatch.setattr(certificate, "certify", failing_once)
    gc.disable()
    try:
        assert loaded(bert, "bert").engine_choice.reason == "not openvino: wrong numbers"
        assert left == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(("load", "copies"), [({}, 3), ({"engine": "torch"}, 1)])
def test_the_copies_of_a_conversion_count_before_a_load(bert: Path, load: dict[str, Any], copies: int) -> None:
    entry = entry_of(bert, "bert", load)
    nbytes = sum(tensor.numel() * 4 for tensor in load_file(bert / "model.safetensors").values())
    assert loader_of(bert).needed_bytes(Catalogue.resolve_profile(entry, "default", entry.id)) == copies * nbytes


def test_a_lane_that_is_alone_runs_a_short_batch_on_a_copy_of_more_threads(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backbones, "usable_cores", lambda: 2)
    graph: Any = loaded(bert, "bert").backbone._runner
    ran: list[Any] = []
    run = graph._run

    def noted(packed: PackedBatch, compiled: Any) -> torch.Tensor:
        ran.append(compiled)
        return run(packed, compiled)  # type: ignore[no-any-return]

    graph._run = noted
    short, long = packed_of([9]), packed_of([100, 100, 100])
    for is_alone, packed, expected in (
        (True, short, graph._alone),
        (True, long, graph._of_lanes),
        (False, short, graph._of_lanes),
    ):
        monkeypatch.setattr(graphs, "is_alone", lambda is_alone=is_alone: is_alone)
        graph.run(packed)
        assert ran.pop() is expected
    nodes = graph._alone._compiled.get_runtime_model().get_ops()
    assert "If" in {node.get_rt_info()["layerType"].astype(str) for node in nodes}  # the graphs of fixed lengths
    of_lanes, in_groups, single = (states for states, _ in graph.trials(packed_of([3, 8, 9, 16, 17, 100])))
    torch.testing.assert_close(in_groups, of_lanes, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(single, of_lanes, atol=1e-5, rtol=1e-4)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each load appends what it computes anew."""
    calls: list[str] = []

    def note(module: Any, name: str) -> None:
        run = getattr(module, name)

        def noted(*arguments: Any) -> Any:
            calls.append(name)
            return run(*arguments)

        monkeypatch.setattr(module, name, noted)

    note(graphs, "_converted")
    note(certificate, "certify")
    note(loading, "check_weights")
    note(text_encoder, "text_tokenizer")
    return calls


ALL_COMPUTED = ["check_weights", "text_tokenizer", "_converted", "certify"]


def test_a_second_load_of_another_process_computes_nothing_again(
    bert: Path, tmp_path: Path, computed: list[str]
) -> None:
    packed = packed_of([9, 40])
    first = loaded(bert, "bert", cache=tmp_path)
    assert computed == ALL_COMPUTED
    second = loaded(bert, "bert", cache=tmp_path)
    assert computed == ALL_COMPUTED
    assert second.certificate == first.certificate
    assert second.tokenizer == first.tokenizer
    torch.testing.assert_close(states(second, packed), states(first, packed), atol=1e-5, rtol=1e-4)
    (_, in_groups, single) = (states for states, _ in second.backbone._runner.trials(packed))
    torch.testing.assert_close(in_groups, states(first, packed), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(single, states(first, packed), atol=1e-5, rtol=1e-4)


def test_a_load_with_other_options_or_weights_computes_all_again(
    bert: Path, tmp_path: Path, computed: list[str]
) -> None:
    loaded(bert, "bert", cache=tmp_path)
    loaded(bert, "bert", cache=tmp_path, causal=False)
    assert computed == 2 * ALL_COMPUTED
    other = tmp_path / "other"
    shutil.copytree(bert, other)
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if name.endswith("weight"))
    status = (other / "model.safetensors").stat()
    save_file({**tensors, name: tensors[name] + 1}, other / "model.safetensors", {"format": "pt"})
    os.utime(other / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (other / "model.safetensors").stat().st_size == status.st_size
    loaded(other, "bert", cache=tmp_path)
    assert computed == 3 * ALL_COMPUTED


@pytest.mark.parametrize("size", [-1, 100])
def test_a_changed_graph_is_computed_again(bert: Path, tmp_path: Path, computed: list[str], size: int) -> None:
    """The file is longer, empty or shorter."""
    loaded(bert, "bert", cache=tmp_path)
    (weights,) = tmp_path.glob(f"{derived.FOLDER}/*/graph/graph.bin")
    data = bytearray(weights.read_bytes())
    if size < 0:
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
    else:
        weights.write_bytes(data[:size])
    assert loaded(bert, "bert", cache=tmp_path).backbone.engine.engine == "openvino"
    assert computed == [*ALL_COMPUTED, "_converted"]
    loaded(bert, "bert", cache=tmp_path)
    assert computed == [*ALL_COMPUTED, "_converted"]


def test_a_kept_graph_that_computes_otherwise_is_computed_again(
    bert: Path, tmp_path: Path, computed: list[str]
) -> None:
    """The digests are right, but the states differ from those of the first load."""
    loaded(bert, "bert", cache=tmp_path)
    (place,) = tmp_path.glob(f"{derived.FOLDER}/*/reference")
    reference = safetensors.torch.load((place / "reference").read_bytes())["reference"]
    kept = DerivedFiles(place.parents[1], place.parent.name, is_kept=True)
    kept.keep("reference", safetensors.torch.save({"reference": reference.flip(1)}))
    for _ in range(2):
        assert loaded(bert, "bert", cache=tmp_path).backbone.engine.engine == "openvino"
        assert computed == [*ALL_COMPUTED, "_converted"]


@pytest.mark.parametrize("name", ["graph.xml", "compressed"])
def test_a_graph_that_is_removed_while_it_is_read_is_computed_again(
    bert: Path, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    loaded(bert, "bert", cache=tmp_path)
    find = DerivedFiles.find

    def found(files: DerivedFiles, entry: str) -> Path | None:
        folder = find(files, entry)
        if folder is not None and entry == "graph":
            (folder / name).unlink()
        return folder

    with monkeypatch.context() as patched:
        patched.setattr(DerivedFiles, "find", found)
        assert loaded(bert, "bert", cache=tmp_path).backbone.engine.engine == "openvino"
    assert loaded(bert, "bert", cache=tmp_path).backbone.engine.engine == "openvino"
    assert computed == [*ALL_COMPUTED, "_converted"]


def test_a_kept_graph_for_which_there_is_no_memory_stays(
    bert: Path, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    loaded(bert, "bert", cache=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(graphs, "_Compiled", full)
        with pytest.raises(ModelLoadFailed, match="too little memory"):
            loaded(bert, "bert", cache=tmp_path)
    loaded(bert, "bert", cache=tmp_path)
    assert computed == ALL_COMPUTED


def test_weights_in_8_bits_rank_as_those_in_32(bert: Path) -> None:
    small, whole = loaded(bert, "bert", "int8"), loaded(bert, "bert")
    assert (small.precision, small.requested_precision, small.precision_reason) == ("int8", "int8", "")
    assert small.engine_choice.demand == "load.precision is int8"
    assert small.memory_bytes < whole.memory_bytes
    packed = packed_of([5, 64, 5, 9, 128])
    small_states = states(small, packed)
    assert float(torch.cosine_similarity(small_states.float(), states(whole, packed), dim=1).min()) > 0.98
    own = slice(int(packed.bounds[0]), int(packed.bounds[1]))
    alone = pack(Items(np.array([5]), packed.ids[own].astype(np.int32)), np.arange(1), Positions())
    torch.testing.assert_close(states(small, alone).float(), small_states[own].float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("facts", "missing", "reason"),
    [
        (replace(TEXTS, device="cuda"), installed, "not openvino: the device is cuda"),
        (replace(TEXTS, lora="org/lora"), installed, "not torch: it does not support weights in 8 bits"),
        (TEXTS, absent, r"sie-cluster\[openvino\]"),
    ],
)
def test_weights_in_8_bits_are_refused_where_there_is_no_graph(facts: EngineFacts, missing: Any, reason: str) -> None:
    with pytest.raises(ModelLoadFailed, match=rf"load\.precision is int8: .*{reason}"):
        engines.choose(None, replace(facts, int8=True), missing)


@pytest.mark.parametrize(("bound", "reason"), [("COSINE_8", "has cosine"), ("TAU_8", "Kendall's tau")])
def test_weights_in_8_bits_that_miss_a_bound_are_refused(
    bound: str, reason: str, bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, bound, 1.01)
    with pytest.raises(ModelLoadFailed, match=reason) as caught:
        loaded(bert, "bert", "int8")
    assert caught.value.extras["error_class"] == "CERTIFICATE"


def test_a_lack_of_memory_is_no_choice_of_engine(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Graph:
        raise MemoryError

    monkeypatch.setattr(graphs, "Graph", full)
    with pytest.raises(ModelLoadFailed, match="too little memory"):
        loaded(bert, "bert")


def test_the_fingerprint_names_the_engine_that_runs_and_not_who_asked() -> None:
    entry = parse_entry(
        {"id": "a/b", "weights": {"path": "x"}, "family": "text-encoder", "outputs": {"dense": 8}, "max_tokens": 8}
    )
    options = LoadOptions(engine="torch")
    assert fingerprint(entry, LoadOptions(), "float32") == fingerprint(entry, options, "float32", "torch")
    assert fingerprint(entry, LoadOptions(), "float32") != fingerprint(entry, LoadOptions(), "float32", "openvino")


def test_openvino_tells_its_maker_nothing(tmp_path: Path) -> None:
    """The import of openvino sends a telemetry event, unless openvino_telemetry cannot be imported."""
    script = (
        "import sys; from sie_adapter.engine.engine import prepare_process; prepare_process(); import openvino;"
        " print([name for name in sys.modules if name.startswith('openvino_telemetry') and sys.modules[name]])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
    assert not list(tmp_path.iterdir())
