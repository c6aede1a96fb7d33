"""Examples of every message. Together they set every field."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from sie_contracts.errors import ErrorInfo
from sie_contracts.media.documents import DocumentFile, DocumentLimits
from sie_contracts.media.images import ImageTokens, Recipe, TileTokens
from sie_contracts.media.sounds import SoundRecipe
from sie_contracts.models.muvera import Muvera
from sie_contracts.wire import device_reports, ipc, messages
from sie_contracts.wire.configs import ConfigDelta, ConfigExport, ConfigModel
from sie_contracts.wire.heartbeats import (
    AnswerErasure,
    DeviceBeat,
    Fetched,
    GatewayBeat,
    Heartbeat,
    LaneTraffic,
    ModelStatus,
    QueuedWork,
    ServedEngine,
    ServedLora,
    ServedPrecision,
    Turn,
)
from sie_contracts.wire.ipc import Group, LoadedModel, Rows, Side
from sie_contracts.wire.messages import (
    ArraySlice,
    BatchNote,
    CancelRequests,
    ChunkRule,
    Confirmation,
    Confirmations,
    DeadLetter,
    Failed,
    Fragment,
    Input,
    Mention,
    Ok,
    Payload,
    Residency,
    RunOptions,
    Stages,
    TextChunks,
    Vectors,
    WorkItem,
    WorkResult,
    WorkResults,
)
from sie_contracts.wire.records import (
    Assigned,
    Demand,
    Placement,
    PlacementPart,
    Reservation,
    Reservations,
    ReservationSpec,
    StreamRequest,
)

_ERROR = ErrorInfo(
    "MODEL_LOAD_FAILED", "no such file", "load_failed", "model", 3, {"error_class": "NOT_FOUND", "attempts": 2}
)
_ENTRY = {
    "id": "org/model",
    "weights": {"hub": "org/model", "revision": "abc"},
    "family": "f",
    "outputs": {"dense": 4},
    "max_tokens": 8,
}
_CERTIFICATE = {"digests": ["model.safetensors"], "packed": {"dense": 0.99999}, "golden": None}
_LOADED = LoadedModel("org/model", "abc", "f00d", "float16", "sdpa", 4096, 1.5, 512, _CERTIFICATE)
_OUTCOMES = (
    Ok({"dense": ArraySlice("<f4", (2,), 0), "multivector": ArraySlice("<f2", (3, 1), 8)}, tokens=7, truncated=True),
    Failed(_ERROR),
)
_BLOCK = bytes(range(14))
_VECTORS = Vectors(2, 1, b"\x00\x00\x80\x3f\x00\x00\x00\xbf")
_MENTIONS = (Mention("person", 0, 3), Mention("person", 8, 11))
_ASKED = RunOptions(
    ("multivector",),
    dtype="int8",
    is_query=True,
    muvera=Muvera(10, 4, 8, None, 7, True, True),
    pieces=(("<q> ", "query", ""), ("<d> ", "document", " </d>")),
    query_prefix="query: ",
    query_suffix=" ?",
    instruction="find",
    labels=("person", "place"),
    threshold=0.25,
    parameters={"flat_ner": False, "score_weights": {"dense": 1.0}},
)

# common fields of the examples of one kind
_work = partial(
    WorkItem,
    request="01a1f797",
    chunk=0,
    model="org/model",
    revision="abc",
    options=RunOptions(),
    reply="sie.result.1",
    budget_ms=30_000,
)
_heartbeat = partial(
    Heartbeat,
    worker="w1",
    pool="_default",
    machine_profile="l4",
    bundle="default",
    ready=True,
    version="0.1.0",
)
_result = partial(WorkResult, request="01a1f797", chunk=0, worker="w1")

# Every field of every message has a value other than its default in some example.
_RECIPE = Recipe("crop", 4, 6, 8, 9, 2, 4, 64, "rounded", "bilinear", (1, 2, 3), 5)
EXAMPLES: dict[str, Any] = {
    "work-1": WorkItem(
        request="01a1f797-9264-759d-abab-85f412890591",
        chunk=3,
        model="org/model",
        revision="abc",
        operation="encode",
        inputs=(Input("first é"), Input("")),
        options=RunOptions(("dense", "sparse"), "query: ", " ?", "NONE", "cls", False, 128, 64, "lora"),
        reply="sie.result.1",
        budget_ms=30_000,
        first=12,
        attempt=1,
        profile="fast",
        config_revision=9,
        priority="bulk",
        cost=321,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    "result-1": WorkResult(
        request="01a1f797",
        chunk=3,
        worker="w1",
        outcomes=_OUTCOMES,
        block=_BLOCK,
        attempt=1,
        revision="abc",
        fingerprint="f00d",
        stages=Stages(
            load_ms=1.5,
            preprocess_ms=2.5,
            batch_wait_ms=3.5,
            device_wait_ms=0.5,
            inference_ms=4.5,
            postprocess_ms=5.5,
            worker_ms=6.5,
        ),
        batch=BatchNote("w1-7", 12, 3, 400, 90_000, 2),
    ),
    "work-1-verbs": _work(
        operation="score",
        inputs=(Input("first"),),
        options=_ASKED,
        query=Input("what is first?"),
    ),
    "result-1-verbs": _result(
        outcomes=(Ok({}, 5, score=-0.5), Ok({}, 6, data={"entities": [{"label": "person", "text": "é", "start": 1}]})),
    ),
    "result-1-images": _result(outcomes=(Ok({}, 5, first_of_several=True),)),
    "work-1-recording": _work(
        operation="extract", inputs=(Input(audio=b"RIFF"),), options=RunOptions(sound_from_s=569.5)
    ),
    "result-1-recording": _result(outcomes=(Ok({}, 1500, data={"entities": []}, sound_s=1234.5),)),
    "result-1-swapped": _result(
        outcomes=(Ok({}, 5),),
        batch=BatchNote("w1-7", 12, 3, 400, 90_000, 2, 12, True),
    ),
    "result-1-engine": _result(
        outcomes=(Ok({}, 5),),
        batch=BatchNote("w1-7", 12, 3, 400, 90_000, engine="openvino"),
    ),
    "work-1-kinds": _work(
        operation="tokenize",
        inputs=(Input(tokens=(101, 70_000, 102)), Input("first", pair="é"), Input(vectors=_VECTORS)),
        query=Input(vectors=_VECTORS),
    ),
    "work-1-mentions": _work(operation="extract", inputs=(Input("Ada met Bob", mentions=_MENTIONS), Input("first"))),
    "work-1-variant": _work(
        operation="encode", inputs=(Input("a"),), options=RunOptions(normalize=False, variant="0a1b2c3d4e5f6071")
    ),
    "work-1-rerank": _work(
        operation="score",
        inputs=(Input("é"),),
        options=RunOptions(document_tokens=64, parameters={"relevance": True}),
        query=Input("first"),
    ),
    "work-1-endpoint": _work(
        operation="encode",
        inputs=(Input("é"),),
        endpoint="embeddings",
    ),
    "work-1-audio": _work(
        operation="encode",
        inputs=(Input("first", audio=b"RIFF\0\0\0\0WAVE"), Input(audio=b"fLaC")),
    ),
    "work-1-document": _work(
        operation="extract",
        inputs=(Input(document=DocumentFile(b"%PDF-1.7")), Input(document=DocumentFile(b"a,b", "csv"))),
    ),
    "work-1-images": _work(
        operation="encode",
        inputs=(Input("first", images=(b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\x00")), Input(images=(b"GIF89a",))),
    ),
    "work-1-asker": _work(
        operation="score",
        inputs=(Input(images=(b"GIF89a",)),),
        query=Input("first"),
        asker="static-1",
    ),
    "work-1-chunks": _work(
        operation="encode",
        inputs=(
            Input("Ada met Bob", chunks=TextChunks(spans=b"\0\0\0\0\x03\0\0\0", context=False)),
            Input("first", chunks=TextChunks(ChunkRule(256, 32, "paragraph", 16))),
        ),
    ),
    "result-1-payload": _result(outcomes=(), stages=Stages(fetch_ms=2.5)),
    "results-1": WorkResults(("r1", "r2"), (b"one", b"two")),
    "confirm-1": Confirmation("duplicate"),
    "confirms-1": Confirmations(("taken", "unknown")),
    "work-1-together": _work(operation="encode", inputs=(Input("first"),), together=True),
    "work-1-traced": _work(
        operation="encode",
        inputs=(Input("first"),),
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        tracestate="a=1",
    ),
    "work-1-payload": _work(
        operation="encode",
        inputs=(),
        payload="ab/abcdef.msgpack",
        count=3,
    ),
    "payload-1": Payload((Input("a text"), Input("é")), Input("what?")),
    "fragment-1": Fragment("01a1f797", 3, 1, 2, 4, "9f86d081", b"\x00\x01\xff"),
    "residency-1": Residency("unload", "org/model:fast"),
    "cancel-1": CancelRequests(("01a1f797", "01a1f798")),
    "heartbeat-1-capacity": _heartbeat(
        slots=14,
        rate=45_000.5,
        held_cost=512,
        credit_cost=32_768,
        models=(ModelStatus("org/model", "loaded", load_s=4.5, oldest_s=0.25, cost_rate=800.5),),
    ),
    "heartbeat-1-own-pool": Heartbeat("w4", "team", "l4", "default", True, "0.2.0", own_pool="_default"),
    "heartbeat-1-clock": Heartbeat("w5", "_default", "l4", "default", True, "0.2.0", clock_ahead_s=7.25),
    "heartbeat-1-listens": Heartbeat("w6", "_default", "l4", "default", True, "0.3.0", listens=True),
    "heartbeat-1-on-disk": Heartbeat("w7", "_default", "l4", "default", True, "0.3.0", on_disk=("org/a", "org/b")),
    "heartbeat-1-unready": _heartbeat(ready=False, unready="preloading org/a"),
    "heartbeat-1-devices": _heartbeat(
        device="cuda:0,cuda:1",
        devices=(
            DeviceBeat("cuda:0", True, "NVIDIA L4", 1 << 30, 24 << 30, 3, ("org/a",)),
            DeviceBeat("cuda:1", False),
        ),
    ),
    "heartbeat-1-items": _heartbeat(
        credit_items=24,
        batch_cost=16_384,
        pipeline=2,
    ),
    "gateway-1": GatewayBeat("g1", True, {"_default.l4.default.bulk": LaneTraffic(12.5, 4096.25, 100.5, 8192)}),
    "gateway-1-qps": GatewayBeat("g1", qps=12.5),
    "gateway-1-epoch": GatewayBeat("g1", config_epoch="a:7"),
    "gateway-1-erasure": GatewayBeat("g1", erasure=AnswerErasure("org/model", "k1", bytes(16)), erasures=3),
    "gateway-1-queued": GatewayBeat(
        "g1",
        queued=(
            QueuedWork(
                "_default",
                "l4",
                "default",
                "bulk",
                "org/model",
                4096,
                1024.5,
                (Turn(b"\x01" * 16, 4.5, 8.0),),
                (b"\x02" * 16,),
            ),
        ),
    ),
    "demand-1": Demand(1_700_000_000.5),
    "reservations-1": Reservations(
        {
            "team": Reservation(
                ReservationSpec("team", {"l4": 2}, "default", 2, 600, {"l4": 4}, ("org/model",)),
                1_700_000_000.5,
                1_700_000_060.5,
            )
        },
        {"gone": 1_700_000_050.5},
    ),
    "reservations-1-last": Reservations(
        {"team": Reservation(ReservationSpec("team", {"l4": 2}), 1_700_000_000.5, 1_700_000_060.5, True)}
    ),
    "reservations-1-owner": Reservations(
        {"team": Reservation(ReservationSpec("team", {"l4": 2}), 1_700_000_000.5, 1_700_000_060.5, owner="k1")}
    ),
    "assigned-1": Assigned({"w1": "team"}),
    "stream-request-1": StreamRequest("WORK_team", "memory", 3, 1800.5, 1 << 30, 4096, 30.5, 60.5, 3),
    "placement-1": Placement(1_700_000_000.5, {"org/model": ("w1", "w2")}, {"org/model": 1_700_000_000.25}),
    "placement-1-parts": Placement(1_700_000_000.5, {"org/model": ("w1",)}, {}, (1, 18_446_744_073_709_551_615)),
    "placement-part-1": PlacementPart(7, {"org/model": ("w1", "w2")}, {"org/model": 1_700_000_000.25}),
    "dead-1": DeadLetter(
        "01a1f797.3.1", "sie.work.p.m.b.bulk.x", b"\x01\x02", _ERROR, ("w1", "w2"), 3, 2, 1_700_000_000.5
    ),
    "heartbeat-1": _heartbeat(
        bundle="vision",
        leaving=True,
        gpu_count=2,
        gpu="NVIDIA L4",
        device="cuda:0",
        memory_used_bytes=5,
        memory_total_bytes=10,
        queue_depth=4,
        config_epoch="a:7",
        models=(ModelStatus("org/model", "failed", 4096, 2, "f00d", _ERROR),),
    ),
    "heartbeat-1-certificate": _heartbeat(
        models=(ModelStatus("org/model", "loaded", certificate=_CERTIFICATE),),
    ),
    "heartbeat-1-fetched": _heartbeat(
        models=(ModelStatus("org/model", "loading", fetched=Fetched(1 << 20, 1 << 30, 5e6)),),
    ),
    "heartbeat-1-precision": _heartbeat(
        models=(
            ModelStatus("org/model", "loaded", precision=ServedPrecision("float32", "bfloat16", "no instructions")),
        ),
    ),
    "heartbeat-1-engine": _heartbeat(
        models=(ModelStatus("org/model", "loaded", engine=ServedEngine("openvino", "the rules")),),
    ),
    "heartbeat-1-images": _heartbeat(
        models=(ModelStatus("org/model", "loaded", image_tokens=2054, image_vectors=1030),),
    ),
    "heartbeat-1-crossover": _heartbeat(
        models=(ModelStatus("org/model", "loaded", crossover_tokens=1152),),
    ),
    "heartbeat-1-revisions": _heartbeat(
        models=(ModelStatus("org/model", "failed", revision=8, loaded_revision=7),),
    ),
    "heartbeat-1-loras": _heartbeat(
        models=(ModelStatus("org/model", "loaded", loras=(ServedLora("org/lora", "5f0c"),)),),
    ),
    "delta-1": ConfigDelta("sie-config", "a:7", "a:8", "org/model", 8, _ENTRY),
    "delta-1-since": ConfigDelta("sie-config", "a:7", "a:8", "org/model", 8, _ENTRY, "a:4"),
    "ipc3-Ping": ipc.Ping(("org/model",)),
    "ipc3-Describe": ipc.Describe(),
    "ipc3-EnsureReady": ipc.EnsureReady("org/model:fast", _ENTRY, "fast", ("org/other",)),
    "ipc3-EnsureLora": ipc.EnsureLora("org/model", "org/lora@abc"),
    "ipc3-Release": ipc.Release("org/model"),
    "ipc3-RunBatch": ipc.RunBatch(
        "w1-7",
        "org/model",
        "extract",
        b"\x02\x00\x00\x00\x01\x00\x00\x00",
        b"\x05\x00\x00\x00\x06\x00\x00\x00\x07\x00\x00\x00",
        (Group(0, 1, _ASKED, 3), Group(1, 2)),
        b"\x00\x01\x00",
        ("a text", "é"),
        bytes(range(24)),
        "cls",
        "lora",
        "00-0a-b7-01",
        may_drop=("org/other",),
    ),
    "ipc3-RunBatch-given": ipc.RunBatch(
        "w1-8",
        "org/model",
        "score",
        bytes(8),
        b"",
        (Group(0, 2),),
        given=b"\x02\x00\x00\x00\x00\x00\x00\x00",
        vectors=_VECTORS.data,
    ),
    "ipc3-RunBatch-copy": ipc.RunBatch("w1-9", "org/model", "encode", b"", b"", (), fingerprint="0a1b2c3d4e5f6071"),
    "ipc3-RunBatch-mentions": ipc.RunBatch(
        "w1-11",
        "org/model",
        "extract",
        bytes(8),
        b"",
        (Group(0, 2),),
        texts=("Ada met Bob", ""),
        mentions=(_MENTIONS, ()),
    ),
    "ipc3-RunBatch-traced": ipc.RunBatch(
        "w1-10",
        "org/model",
        "encode",
        bytes(4),
        b"",
        (Group(0, 1, traceparent="00-0a-b8-01", tracestate="a=1"),),
        traceparent="00-0a-b7-01",
        tracestate="a=1",
    ),
    "ipc3-RunBatch-images": ipc.RunBatch(
        "w1-11",
        "org/model",
        "encode",
        bytes(4),
        b"",
        (Group(0, 1),),
        images=b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0",
        pixels=bytes(range(6)),
    ),
    "ipc3-RunBatch-sounds": ipc.RunBatch(
        "w1-12",
        "org/model",
        "encode",
        bytes(4),
        b"",
        (Group(0, 1),),
        sounds=b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0",
        features=bytes(24),
    ),
    "ipc3-RunBatch-chunks": ipc.RunBatch(
        "w1-15",
        "org/model",
        "encode",
        bytes(8),
        b"",
        (Group(0, 2, inputs=1, chunked=(ipc.ChunkedRows(2, bytes(12), bytes(16)),)),),
    ),
    "ipc3-RunBatch-documents": ipc.RunBatch(
        "w1-13",
        "org/model",
        "extract",
        bytes(8),
        b"",
        (Group(0, 2),),
        texts=("", ""),
        documents=(DocumentFile(b"a,b", "csv"), None),
    ),
    "ipc3-RunBatch-keys": ipc.RunBatch(
        "w1-14",
        "org/model",
        "score",
        bytes(4),
        b"",
        (Group(0, 1),),
        images=b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0",
        pixels=bytes(range(6)),
        image_keys=bytes(range(16)),
    ),
    "ipc3-Drain": ipc.Drain(),
    "ipc3-Cancel": ipc.Cancel(),
    "ipc3-Pong": ipc.Pong(4711, 0.25, 99, ("org/other",)),
    "ipc3-Pong-fetching": ipc.Pong(4711, fetching={"org/model": Fetched(1 << 20, 1 << 30, 5e6)}),
    "ipc3-Description": ipc.Description(3, 4711, "cuda:0", "0.1.0", 2, "NVIDIA L4", 5, 10, (_LOADED,)),
    "ipc3-Description-device": ipc.Description(
        3,
        4711,
        "cpu",
        "0.1.0",
        utilization_percent=37.5,
        threshold_percent=85.0,
        shortages=(device_reports.Shortages("org/model", 1, 2, 3, 4, 5, 6),),
    ),
    "ipc3-Description-towers": ipc.Description(3, 4711, "cpu", "0.1.0", towers=device_reports.TowerUse(9, 1, 1 << 20)),
    "ipc3-Description-devices": ipc.Description(3, 4711, "cuda:1", "0.1.0", devices=2),
    "ipc3-Description-batches": ipc.Description(
        3,
        4711,
        "cpu",
        "0.1.0",
        batches=(
            device_reports.RanBatch(
                7, 1.5e9, "org/model", "encode", 2, 2, 1, 83, 60, 4129, 0.25, True, 1, 13, 1.5, 0.5, 1 << 20
            ),
        ),
    ),
    "ipc3-Ready": ipc.Ready(
        _LOADED,
        b'{"model": {}}',
        512,
        {"score": Rows("sides", Side(3, 32, 32, False), Side(4, 300))},
        1.25,
        ("org/other",),
    ),
    "ipc3-Ready-writes": ipc.Ready(_LOADED, b"{}", 512, {"extract": Rows("raw", writes=True)}),
    "ipc3-Ready-kinds": ipc.Ready(_LOADED, b"{}", 512, {"encode": Rows(tokens=True, pairs=True, vectors=128)}),
    "ipc3-Ready-sounds": ipc.Ready(
        _LOADED,
        b"{}",
        512,
        {
            "encode": Rows(
                sounds=SoundRecipe(48000, 480_000, 1024, 480, 64, 7500, 50.0, 14_000.0, "htk", "repeat", True)
            )
        },
    ),
    "ipc3-Ready-sounds-whole": ipc.Ready(
        _LOADED,
        b"{}",
        512,
        {
            "extract": Rows(
                "raw",
                writes=True,
                sounds=SoundRecipe(
                    16000, 480_000, 400, 160, 80, 1500, 0.0, 8000.0, "slaney", "pad", levels="relative", whole=True
                ),
            )
        },
    ),
    "ipc3-Ready-sounds-natural": ipc.Ready(
        _LOADED,
        b"{}",
        512,
        {
            "extract": Rows(
                "raw",
                sounds=SoundRecipe(
                    16000,
                    512,
                    512,
                    160,
                    128,
                    1280,
                    high=8000.0,
                    filling="none",
                    levels="natural",
                    whole=True,
                    emphasis=0.97,
                    span=400,
                ),
            )
        },
    ),
    "ipc3-Ready-chunks": ipc.Ready(_LOADED, b"{}", 512, {"encode": Rows(chunks=True, pooling="mean")}),
    "ipc3-Ready-documents": ipc.Ready(_LOADED, b"{}", 512, {"extract": Rows("raw", documents=DocumentLimits(1 << 20))}),
    "ipc3-Ready-questions": ipc.Ready(_LOADED, b"{}", 512, {"extract": Rows("raw", questions=3)}),
    "ipc3-Ready-images": ipc.Ready(
        _LOADED, b"{}", 512, {"encode": Rows(images=_RECIPE, image_tokens=ImageTokens(9, 2, (1,), (2, 3)))}
    ),
    "ipc3-Ready-images-tiles": ipc.Ready(
        _LOADED,
        b"{}",
        512,
        {
            "encode": Rows(
                images=Recipe("tiles", longest=64, multiple=32, block_tokens=4),
                image_tokens=ImageTokens(9, 2, (1,), (2,), tiles=TileTokens((((1, 3), (4,)), ((5,), (6,))), (7, 8))),
            )
        },
    ),
    "ipc3-Ready-images-beside": ipc.Ready(
        _LOADED,
        b"{}",
        512,
        {
            "encode": Rows(
                images=Recipe("blocks", multiple=32, min_pixels=4096, max_pixels=16384, block_tokens=1),
                image_tokens=ImageTokens(9, before=(1,), after=(2,), beside_text=True),
                empty="NULL",
            )
        },
    ),
    "ipc3-Ready-precision": ipc.Ready(
        LoadedModel(
            "org/model",
            "abc",
            "f00d",
            "float32",
            "sdpa",
            requested_precision="bfloat16",
            precision_reason="no instructions",
        ),
        b"{}",
        512,
    ),
    "ipc3-Ready-engine": ipc.Ready(
        LoadedModel("org/model", "abc", "f00d", "float32", "sdpa", engine="openvino", engine_reason="the rules"),
        b"{}",
        512,
    ),
    "ipc3-Ready-crossover": ipc.Ready(
        LoadedModel("org/model", "abc", "f00d", "float32", "sdpa", crossover_tokens=1152),
        b"{}",
        512,
    ),
    "ipc3-BatchStarted": ipc.BatchStarted("w1-7"),
    "ipc3-BatchDone": ipc.BatchDone("w1-7", _OUTCOMES, _BLOCK, 3.5, 0.5, dropped=("org/other",)),
    "ipc3-BatchDone-padded": ipc.BatchDone("w1-7", _OUTCOMES, _BLOCK, 3.5, 0.5, 12),
    "ipc3-BatchDone-tokenised": ipc.BatchDone("w1-7", _OUTCOMES, _BLOCK, 3.5, 0.5, 12, 1.25),
    "ipc3-BatchDone-engine": ipc.BatchDone("w1-7", _OUTCOMES, _BLOCK, 3.5, engine="openvino"),
    "ipc3-Done": ipc.Done(),
    "ipc3-Done-lora": ipc.Done("9f86d081"),
    "ipc3-Refused": ipc.Refused(_ERROR, "w1-7", ("org/other",)),
    "export-1": ConfigExport(
        "a:7",
        (ConfigModel("org/model", _ENTRY, 7, ("default",), "id: org/model\n"),),
        ({"id": "default"},),
        2,
        "2026-01-01T00:00:00+00:00",
    ),
    "export-1-hashes": ConfigExport("a:7", (), bundle_config_hashes={"default": "f00d"}),
    "export-1-written": ConfigExport("a:7", (ConfigModel("org/model", _ENTRY, 7, written=5),)),
}


def encoded(name: str) -> bytes:
    """Encode an example as it is sent: the export over HTTP in JSON, all else in msgpack."""
    return msgspec.json.encode(EXAMPLES[name]) if name.startswith("export") else messages.encode(EXAMPLES[name])


# fields whose keys are data, so that a further key would change the value
_DATA = {
    "entry",
    "parameters",
    "data",
    "extras",
    "model_config",
    "bundles",
    "bundle_config_hashes",
    "certificate",
    "hosts",
    "raised_s",
    "gpus",
    "gpu_caps",
    "ended",
    "workers",
}
_NAMED = {"outputs", "rows", "traffic", "pools", "fetching"}  # maps from names that are data to structs


def newer(value: Any, key: str = "") -> Any:
    """Return the message as a newer sender would send it, with a further field in every map, and a further element in
    every array slice.
    """
    if key in _DATA:
        return value
    if isinstance(value, dict):
        if key in _NAMED:
            return {
                name: [*item, "element of the future"] if isinstance(item, list) else newer(item)
                for name, item in value.items()
            }
        return {
            **{name: newer(item, name) for name, item in value.items()},
            "field_of_the_future": {"nested": [1, "x"]},
        }
    if isinstance(value, list):
        return [newer(item) for item in value]
    return value


def newer_bytes(name: str) -> bytes:
    codec: Any = msgspec.json if name.startswith("export") else msgspec.msgpack
    return bytes(codec.encode(newer(codec.decode(encoded(name)))))
