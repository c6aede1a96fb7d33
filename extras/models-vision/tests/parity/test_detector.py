"""Objects in images equal those of transformers' own models and processors: Grounding DINO and OWLv2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from image_files import turned
from numpy.typing import NDArray
from parity import detector_checkpoints
from parity.detector_checkpoints import LABEL_TOKENS, PROMPT_TOKENS, SIDE
from parity.page_engine import Load, Served, pairs, served_by
from parity.table import ParityTable, Scores
from parity.toys import image, png, prepared
from PIL import Image
from transformers import (
    AutoModelForZeroShotObjectDetection,
    AutoTokenizer,
    GroundingDinoImageProcessorPil,
    GroundingDinoProcessor,
    Owlv2ImageProcessorPil,
    Owlv2Processor,
)

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.packed.packing import Shown
from sie_client import draw
from sie_contracts.errors import ErrorInfo, ModelLoadFailed
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.wire.messages import RunOptions
from sie_models_vision.detector import Detector

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "grounding-dino": detector_checkpoints.grounding_dino,
    "owlv2": detector_checkpoints.owlv2,
}
MAX_TOKENS = {"grounding-dino": PROMPT_TOKENS, "owlv2": LABEL_TOKENS}
LABELS = ("a river", "A Mountain engine", "vector")
# ragged: square, wide, tall, two of one size, smaller than the model's size, one pixel more
PICTURES = [
    image(width, height, seed)
    for seed, (width, height) in enumerate([(SIDE, SIDE), (190, 90), (60, 171), (190, 90), (40, 31), (97, 101)])
]
CLOSE = 1e-5
ROUNDED = 0.5 + 1e-2  # in pixels, for a corner that lies between two

Objects = list[dict[str, Any]]


class Asked(NamedTuple):
    """An input: its files, and the labels and options of the search."""

    files: Sequence[bytes]
    labels: Sequence[str] = LABELS
    threshold: float | None = 0.0
    parameters: Mapping[str, float] = MappingProxyType({})


def find(served: Served, *requests: Asked) -> list[Any]:
    """Return the objects of each input, or its error. All inputs are one batch."""
    options = [
        RunOptions((), labels=tuple(job.labels), threshold=job.threshold, parameters=dict(job.parameters))
        for job in requests
    ]
    outputs = served.extract([(job.files, option) for job, option in zip(requests, options, strict=True)])
    return [output if isinstance(output, ErrorInfo) else output["objects"] for output in outputs]


def _scores(detector: Detector, shown: Image.Image, labels: Sequence[str]) -> NDArray[np.float32]:
    """Return the scores of the labels, [candidates, labels]."""
    kind: Any = detector._kind
    picture = prepared(png(shown), kind.recipe)
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)
    with torch.inference_mode():
        sight = kind.detect([Shown(pixels, *picture.upright)], kind.prompt(labels))
    return sight.scores[0].cpu().numpy()  # type: ignore[no-any-return]


class Candidates(NamedTuple):
    """Candidates of an oracle, in its order: corners in pixels [candidates, 4], scores of labels [candidates,
    labels].
    """

    corners: NDArray[np.float32]
    scores: NDArray[np.float32]


class GroundingDino:
    """transformers' model and processor, one image at a time. The library has no labels, so the words between two full
    stops of its prompt are one label.
    """

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForZeroShotObjectDetection.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = GroundingDinoProcessor(GroundingDinoImageProcessorPil.from_pretrained(folder), tokenizer)

    def __call__(self, shown: Image.Image, labels: Sequence[str]) -> Candidates:
        with torch.inference_mode():
            inputs = self.processor(images=[shown], text=[list(labels)], return_tensors="pt")
            outputs = self.model(**inputs)
        (detections,) = self.processor.post_process_grounded_object_detection(
            outputs, inputs.input_ids, threshold=-1.0, target_sizes=[(shown.height, shown.width)]
        )
        probabilities = outputs.logits[0].sigmoid().numpy()
        words: list[list[int]] = [[]]
        for place, token in enumerate(self.processor.tokenizer.convert_ids_to_tokens(inputs.input_ids[0])):
            if token == ".":
                words.append([])
            elif token not in ("[CLS]", "[SEP]"):
                words[-1].append(place)
        scores = np.stack([probabilities[:, places].max(1) for places in words[: len(labels)]], 1)
        assert (scores.max(1) <= detections["scores"].numpy() + 1e-6).all()
        return Candidates(detections["boxes"].numpy(), scores)


class Owlv2:
    """transformers' model and processor, one image at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForZeroShotObjectDetection.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Owlv2Processor(Owlv2ImageProcessorPil.from_pretrained(folder), tokenizer)

    def __call__(self, shown: Image.Image, labels: Sequence[str]) -> Candidates:
        with torch.inference_mode():
            inputs = self.processor(
                images=[shown], text=[list(labels)], truncation=True, max_length=LABEL_TOKENS, return_tensors="pt"
            )
            outputs = self.model(**inputs)
        size = torch.tensor([[shown.height, shown.width]])
        (detections,) = self.processor.post_process_grounded_object_detection(
            outputs, threshold=-1.0, target_sizes=size
        )
        return Candidates(detections["boxes"].numpy(), outputs.logits[0].sigmoid().numpy())


@pytest.fixture(scope="module")
def load(cpu_engine: AdapterEngine, tmp_path_factory: pytest.TempPathFactory) -> Load[GroundingDino | Owlv2]:
    oracles: dict[str, type[GroundingDino] | type[Owlv2]] = {"grounding-dino": GroundingDino, "owlv2": Owlv2}
    root = tmp_path_factory.mktemp("detectors")
    return pairs(cpu_engine, root, FOLDERS, _entry, lambda kind, folder: oracles[kind](folder))


def _entry(kind: str, folder: Path, **changes: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": f"detector/{kind}",
            "weights": {"path": str(folder)},
            "family": "detector",
            "inputs": ["image"],
            "outputs": {"objects": 0},
            "max_tokens": MAX_TOKENS[kind],
            **changes,
        }
    )


def _differences(
    detections: Objects, candidates: Candidates, labels: Sequence[str], size: tuple[int, int], least: float = 0.0
) -> tuple[float, float]:
    """The largest difference of a score, and of a corner in pixels. Each object is matched with a candidate of its
    score and label.
    """
    width, height = size
    best = candidates.scores.argmax(1)
    corners = candidates.corners.clip(0, [width, height, width, height])
    left = [index for index in range(len(best)) if candidates.scores[index, best[index]] >= least]
    score_gap = corner_gap = 0.0
    assert [box["score"] for box in detections] == sorted((box["score"] for box in detections), reverse=True)
    for detection in detections:
        x, y, w, h = detection["bbox"]
        assert all(isinstance(edge, int) for edge in detection["bbox"])
        assert 0 <= x < x + w <= width
        assert 0 <= y < y + h <= height
        gaps = {
            index: (
                abs(candidates.scores[index, best[index]] - detection["score"]),
                abs(corners[index] - [x, y, x + w, y + h]).max(),
            )
            for index in left
            if labels[best[index]] == detection["label"]
        }
        nearest = min(gaps, key=lambda index: max(gaps[index][0] / CLOSE, gaps[index][1]))
        left.remove(nearest)
        score_gap, corner_gap = (float(max(pair)) for pair in zip((score_gap, corner_gap), gaps[nearest], strict=True))
    for index in left:  # a candidate without an object has no area
        x0, y0, x1, y1 = np.rint(corners[index])
        assert x0 == x1 or y0 == y1
    return score_gap, corner_gap


@pytest.mark.parametrize("kind", FOLDERS)
def test_objects_equal_the_oracle(kind: str, load: Load[Any], table: ParityTable) -> None:
    """A batch of images of many sizes with different labels, against the library one by one. The scores of all labels
    are compared as well, since one label may be the best everywhere.
    """
    pair = load(kind)
    lists = (LABELS, LABELS[::-1], ("queue",))
    requests = [Asked([png(shown)], lists[index % 3]) for index, shown in enumerate(PICTURES)]
    for shown, job, detections in zip(PICTURES, requests, find(pair.served, *requests), strict=True):
        expected = pair.oracle(shown, job.labels)
        score, corner = _differences(detections, expected, job.labels, shown.size)
        assert score <= CLOSE
        assert corner <= ROUNDED
        assert len(detections) >= 5
        assert {detection["label"] for detection in detections} <= set(job.labels)
        every = float(abs(_scores(pair.served.weights, shown, job.labels) - expected.scores).max())
        assert every <= CLOSE
        assert np.ptp(expected.scores, 0).min() > 0.01
        table.record(f"detector {kind}", pair.served.path, "float32", Scores(max(score, every)))


@pytest.mark.parametrize("kind", FOLDERS)
def test_objects_do_not_depend_on_batch_mates(kind: str, load: Load[Any]) -> None:
    """The batch has images of other sizes, images of the same size, and other labels."""
    served = load(kind).served
    requests = [
        Asked([png(shown)], labels) for shown in PICTURES for labels in (LABELS, ("queue", "a river on the mountain"))
    ]
    for job, together in zip(requests, find(served, *requests), strict=True):
        (alone,) = find(served, job)
        assert [(detection["label"], detection["bbox"]) for detection in alone] == [
            (detection["label"], detection["bbox"]) for detection in together
        ]
        assert [detection["score"] for detection in alone] == pytest.approx(
            [detection["score"] for detection in together], abs=2e-6
        )


# the patches at which objects begin, by the size of the upright image; a patch is a sixth of the longer edge
PLACES = {(96, 96): [(2, 3)], (192, 96): [(0, 1), (1, 4)], (90, 180): [(3, 1)], (600, 402): [(0, 0), (2, 3)]}
# the transposition of an upright image into the one that a camera stores, by the EXIF orientation
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.fixture(scope="module")
def red(cpu_engine: AdapterEngine, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = detector_checkpoints.red_patches(tmp_path_factory.mktemp("detectors") / "red")
    return served_by(cpu_engine, _entry("owlv2", folder, id="detector/red", load={"precision": "float32"}))


@pytest.mark.parametrize("size", PLACES, ids=str)
def test_boxes_are_where_a_person_sees_the_objects_however_the_camera_was_held(
    size: tuple[int, int], red: Served
) -> None:
    """A detector whose answers are known. An object is pink, with a red corner at its upper left. Each file holds the
    same upright image, and the client draws the boxes around the objects.
    """
    edge = max(size) // 6
    boxes = [[column * edge, row * edge, 2 * edge, 2 * edge] for row, column in PLACES[size]]
    upright = Image.new("RGB", size, "white")
    for left, top, *_ in boxes:
        upright.paste((255, 160, 160), (left, top, left + 2 * edge, top + 2 * edge))
        upright.paste((255, 0, 0), (left, top, left + edge, top + edge))
    for orientation, turn in STORED.items():
        file = turned(orientation, upright if turn is None else upright.transpose(turn))
        (detections,) = find(red, Asked([file], ["a red corner"], 0.5))
        assert [detection["bbox"] for detection in detections] == boxes, orientation
        assert min(detection["score"] for detection in detections) > 0.99
        drawn = draw(file, {"objects": [{**detection, "label": "x"} for detection in detections]})
        assert drawn.size == upright.size
        different = (np.asarray(drawn) != np.asarray(upright)).any(2)
        for left, top, width, height in boxes:
            right, bottom = left + width - 1, top + height - 1
            for frame in (different[top : bottom + 1, right], different[bottom, left : right + 1]):
                assert frame.all(), orientation
            line = max(1, round(max(size) / 400))
            inside = different[top + edge : bottom + 1 - line, left + edge : right + 1 - line]
            assert not inside.any(), "beyond the label, nothing is drawn within a frame"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("grounding-dino", "box_threshold"), ("grounding-dino", "text_threshold"), ("owlv2", "score_threshold")],
)
def test_thresholds_keep_the_best(kind: str, name: str, load: Load[Any]) -> None:
    """`threshold` replaces all other thresholds."""
    served = load(kind).served
    file = png(PICTURES[1])
    (every,) = find(served, Asked([file]))
    least = every[len(every) // 2]["score"]
    thresholds = dict.fromkeys(served.weights._kind.thresholds, 0.0)
    expected = [detection for detection in every if detection["score"] >= least]
    assert 0 < len(expected) < len(every)
    for job in (
        Asked([file], threshold=None, parameters={**thresholds, name: least}),
        Asked([file], threshold=least),
        Asked([file], threshold=least, parameters={**thresholds, name: 1.0}),
    ):
        assert find(served, job) == [expected]
    default = max(served.weights._kind.thresholds.values())
    assert find(served, Asked([file], threshold=None)) == [
        [detection for detection in every if detection["score"] >= default]
    ]


def test_an_option_of_another_detector_is_refused(load: Load[Any]) -> None:
    file = png(PICTURES[0])
    for kind, name in (("grounding-dino", "score_threshold"), ("owlv2", "box_threshold"), ("owlv2", "text_threshold")):
        detections, error = find(load(kind).served, Asked([file]), Asked([file], parameters={name: 0.1}))
        assert isinstance(detections, list)
        assert (error.code, error.reason, error.param) == ("INVALID_INPUT", "unknown_option", name)


@pytest.mark.parametrize("kind", FOLDERS)
def test_an_input_without_one_image_fails_alone(kind: str, load: Load[Any]) -> None:
    file = png(PICTURES[0])
    none, single, two = find(load(kind).served, Asked([]), Asked([file]), Asked([file, file]))
    assert isinstance(single, list)
    assert (none.code, none.reason, none.param) == ("INVALID_INPUT", "unsupported_modality", "images")
    assert (two.code, two.reason, two.param, two.extras) == ("INVALID_INPUT", "invalid_media", "images", {"limit": 1})


def test_labels_with_full_stops_and_capitals_are_the_clients(load: Load[Any]) -> None:
    """The model reads labels without full stops and capitals. The objects have the labels of the request."""
    pair = load("grounding-dino")
    odd, plain = ("St. River?", "MOUNTAIN...Engine", " vector "), ("st river", "mountain engine", "vector")
    detections, expected = find(pair.served, Asked([png(PICTURES[1])], odd), Asked([png(PICTURES[1])], plain))
    assert [{**detection, "label": plain[odd.index(detection["label"])]} for detection in detections] == expected
    assert {detection["label"] for detection in detections} <= set(odd)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((), "expected at least one"),
        (("river", "..?"), "only full stops"),
        (("river", "\u200b"), "empty after tokenisation"),
        (("river [SEP] vector",), ""),
        (tuple(f"river mountain {number}" for number in range(80)), "tokens, the model reads at most 256"),
    ],
)
def test_labels_that_grounding_dino_cannot_read_are_refused(
    labels: tuple[str, ...], message: str, load: Load[Any]
) -> None:
    """Other inputs of the batch are answered. A special token in a label is read as letters."""
    file = png(PICTURES[0])
    good, error = find(load("grounding-dino").served, Asked([file]), Asked([file], labels))
    assert isinstance(good, list)
    if not message:
        assert {detection["label"] for detection in error} == set(labels)
        return
    assert isinstance(error, ErrorInfo)
    assert (error.code, error.reason, error.param) == ("INVALID_INPUT", "labels", "labels")
    assert message in error.message


# what a load refuses


def test_a_tokenizer_with_other_ids_is_refused(cpu_engine: AdapterEngine, tmp_path: Path) -> None:
    """The model compares ids with those of bert-base-uncased."""
    folder = detector_checkpoints.grounding_dino(tmp_path / "other", {".": 1013})
    entry = _entry("grounding-dino", folder)
    assert "the model expects . 1012" in Detector.fault_of_files(folder, entry)
    with pytest.raises(ModelLoadFailed, match=r"the model expects \. 1012"):
        cpu_engine.residency.ensure("detector/other", entry)
