"""Vectors of texts and images equal those of transformers' own model and image processor: CLIP and SigLIP."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import dual_checkpoints
from parity.device import SIXTEEN
from parity.dual_checkpoints import CLIP_TOKENS, FIRST_SIGLIP_TOKENS, OPEN_CLIP_WIDTH, SIGLIP_TOKENS, SIZE, WIDTH
from parity.heads_checkpoints import texts
from parity.open_clip_cases import SIZES, TEXTS
from parity.page_engine import Load, Vectors, pairs, served_by
from parity.table import Agreement, ParityTable
from parity.toys import image
from PIL import Image
from selection import long_but
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.wire.messages import Input, RunOptions
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.rows import WorkItemInput

MAX_DIFFERENCE = {"float32": 2e-6, SIXTEEN: 3e-2}
Given = str | Sequence[Image.Image]

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "clip": dual_checkpoints.clip,
    "clip gelu": lambda folder: dual_checkpoints.clip(folder, activation="gelu"),
    "clip eos 2": lambda folder: dual_checkpoints.clip(folder, eos=2),
    "siglip": lambda folder: dual_checkpoints.siglip(folder, first=True),
    "siglip2": dual_checkpoints.siglip,
}
TOKENS = {"siglip": FIRST_SIGLIP_TOKENS, "siglip2": SIGLIP_TOKENS}
# ragged: square, wide, tall, smaller than the model's size, an odd number of pixels, a strip
PICTURES = [
    image(width, height, seed)
    for seed, (width, height) in enumerate(
        [(SIZE, SIZE), (200, 90), (33, 171), (20, 31), (97, 101), (301, 7), (640, 480)]
    )
]


class Oracle:
    """transformers' model with its own image processor, one input at a time."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._is_siglip = self._model.config.model_type == "siglip"

    def __call__(self, source: Given) -> Vectors:
        """Return [width], not normalised."""
        with torch.inference_mode():
            if isinstance(source, str):
                # SigLIP was trained on padded texts in lower case, and attends to the padding.
                text = source.lower() if self._is_siglip else source
                ids = self._tokenizer(
                    text,
                    padding="max_length" if self._is_siglip else False,
                    truncation=True,
                    max_length=self._model.config.text_config.max_position_embeddings,
                    return_tensors="pt",
                ).input_ids
                features = self._model.get_text_features(input_ids=ids).pooler_output
            else:
                pixels = self._processor(images=list(source), return_tensors="pt").pixel_values
                features = self._model.get_image_features(pixel_values=pixels).pooler_output
                if len(source) > 1:
                    features = torch.nn.functional.normalize(features, dim=1).mean(0, keepdim=True)
        return features[0].numpy()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def load(cpu_engine: AdapterEngine, tmp_path_factory: pytest.TempPathFactory) -> Load[Oracle]:
    return pairs(cpu_engine, tmp_path_factory.mktemp("dual"), FOLDERS, entry_of, lambda _, folder: Oracle(folder))


def entry_of(kind: str, folder: Path, **more: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": f"dual/{kind}",
            "weights": {"path": str(folder)},
            "family": "dual-encoder",
            "inputs": ["text", "image"],
            "outputs": {"dense": WIDTH},
            "max_tokens": TOKENS.get(kind, CLIP_TOKENS),
            **more,
        }
    )


def _mixed() -> list[Given]:
    """Return texts and images in turns, with an empty text, a text far over the limit, and one with three images."""
    sentences = [*texts(6), "", "Ärger ÜBER 2026 " * 60, "two words"]
    pictures: list[Given] = [[picture] for picture in PICTURES]
    pictures.append(PICTURES[1:4])
    mixed: list[Given] = []
    for index in range(max(len(sentences), len(pictures))):
        mixed += sentences[index : index + 1]
        mixed += pictures[index : index + 1]
    return mixed


@pytest.mark.parametrize("precision", ["float32", SIXTEEN])
@pytest.mark.parametrize("kind", long_but(FOLDERS, ["clip", "siglip2"]))
def test_vectors_equal_the_oracle(kind: str, precision: str, load: Load[Oracle], table: ParityTable) -> None:
    """A batch of texts and images of many sizes, not normalised, against the model's own classes one by one."""
    pair = load(kind, precision)
    sources = _mixed()
    vectors = np.stack(pair.served.run("encode", sources, normalize=False))
    expected = np.stack([pair.oracle(source) for source in sources])
    agreement = Agreement.of(vectors, expected)
    table.record(f"dual-encoder {kind}", pair.served.path, precision, agreement)
    assert agreement.difference <= MAX_DIFFERENCE[precision]
    # SigLIP's classes pass no bounds to attention, so it does not run packed.
    assert pair.served.path == ("padded" if kind in TOKENS else "packed")


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_vector_does_not_depend_on_its_batch_mates(kind: str, load: Load[Oracle]) -> None:
    pair = load(kind)
    sources = _mixed()
    together = pair.served.run("encode", sources, normalize=False)
    for source, vector in zip(sources, together, strict=True):
        (alone,) = pair.served.run("encode", [source], normalize=False)
        assert np.abs(alone - vector).max() <= 2e-6 * max(1.0, np.abs(alone).max())


def test_a_text_that_is_cut_keeps_its_end_token(load: Load[Oracle]) -> None:
    served = load("clip").served
    layout = served.weights.rows["encode"]
    work = WorkItemInput([Input("word " * 200)], None, RunOptions(("dense",)))
    (work_rows,) = layouts.make(served.tokenizer, layout, [work])
    (row,) = work_rows.rows
    assert len(row.ids) == CLIP_TOKENS
    assert row.ids[-1] == served.tokenizer.last[-1]
    assert row.truncated


def test_a_model_of_open_clip_gives_the_vectors_of_open_clip(
    cpu_engine: AdapterEngine, tmp_path: Path, table: ParityTable
) -> None:
    """golden/make_marqo.py wrote the vectors of open_clip to a file, because open_clip needs torchvision."""
    folder = dual_checkpoints.marqo(tmp_path / "marqo")
    served = served_by(cpu_engine, marqo_entry(folder))
    sources = [*TEXTS, *(image(*size, seed) for seed, size in enumerate(SIZES))]
    stored = json.loads((Path(__file__).parent / "golden" / "marqo.json").read_text())
    vectors = np.stack(served.run("encode", sources))
    agreement = Agreement.of(vectors, np.array([*stored["texts"], *stored["images"]]))
    table.record("dual-encoder marqo", served.path, "float32", agreement)
    assert agreement.difference <= MAX_DIFFERENCE["float32"]


def marqo_entry(folder: Path) -> ModelEntry:
    return entry_of("siglip", folder, id="dual/marqo", outputs={"dense": OPEN_CLIP_WIDTH})


def _edit(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda config: config["preprocess_cfg"].update(resize_mode="shortest"), "expected resize_mode squash"),
        (lambda config: config["preprocess_cfg"].pop("mean"), "mean is None, expected a number or three numbers"),
        (lambda config: config["model_cfg"]["text_cfg"].update(pool_type="argmax"), "which is no supported SigLIP"),
    ],
)
def test_another_model_of_open_clip_is_refused(
    edit: Callable[[dict[str, Any]], None], message: str, cpu_engine: AdapterEngine, tmp_path: Path
) -> None:
    folder = dual_checkpoints.marqo(tmp_path / "marqo")
    _edit(folder / "open_clip_config.json", edit)
    with pytest.raises(ModelLoadFailed, match=message):
        cpu_engine.residency.ensure("dual/other", marqo_entry(folder))
