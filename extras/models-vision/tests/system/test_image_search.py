"""Ten images searched by words, with a CLIP that is trained here until it ranks them right: the served ranking is the
library's.
"""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from cluster import Cluster, running
from local_models import under
from parity.dual_checkpoints import CLIP_TOKENS, SIZE, WIDTH, clip
from parity.toys import png
from PIL import Image, ImageDraw
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

pytestmark = pytest.mark.long

COLOURS = {
    "red": (200, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 70, 200),
    "yellow": (220, 200, 50),
    "black": (20,) * 3,
}
SHAPES = ("circle", "square")
KINDS = list(itertools.product(COLOURS, SHAPES))
CAPTIONS = [f"a {colour} {shape}" for colour, shape in KINDS]
TRAINED_S = 120.0  # at most


def drawn(colour: str, shape: str, rng: np.random.Generator) -> Image.Image:
    """A shape somewhere on a light ground, of some size, in an image that need not be square."""
    width, height = (int(edge) for edge in rng.integers(40, 120, 2))
    ground = tuple(int(level) for level in rng.integers(215, 255, 3))
    image = Image.new("RGB", (width, height), ground)
    edge = float(rng.uniform(0.45, 0.8)) * min(width, height)
    middle_x, middle_y = width / 2 + rng.uniform(-4, 4), height / 2 + rng.uniform(-4, 4)
    box = (middle_x - edge / 2, middle_y - edge / 2, middle_x + edge / 2, middle_y + edge / 2)
    draw = ImageDraw.Draw(image)
    (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=COLOURS[colour])
    return image


@dataclass(frozen=True)
class Search:
    """`images` [10, width] and `captions` [10, width] are the library's vectors, normalised."""

    folder: Path
    files: list[bytes]
    images: np.ndarray
    captions: np.ndarray


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    folder = clip(tmp_path_factory.mktemp("search") / "weights" / "clip")
    model = CLIPModel.from_pretrained(folder).train()
    processor, tokenizer = (
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
        AutoTokenizer.from_pretrained(folder),
    )
    texts = tokenizer(CAPTIONS, padding=True, return_tensors="pt")
    pictures = [drawn(*kind, np.random.default_rng(1000 + seed)) for seed, kind in enumerate(KINDS)]
    shown = processor(images=pictures, return_tensors="pt")

    def vectors() -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            output = model(**texts, **shown)
        return output.image_embeds, output.text_embeds

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    rng, until_s, right = np.random.default_rng(0), time.monotonic() + TRAINED_S, 0
    torch.manual_seed(0)
    while right < 3:  # three times in a row: not by chance
        assert time.monotonic() < until_s, "the model does not learn to rank"
        for _ in range(10):
            batch = processor(images=[drawn(*kind, rng) for kind in KINDS], return_tensors="pt")
            optimizer.zero_grad()
            model(**texts, **batch, return_loss=True).loss.backward()
            optimizer.step()
        images, captions = vectors()
        best = (captions @ images.T).argmax(1)
        right = right + 1 if best.tolist() == list(range(len(KINDS))) else 0
    model.eval().save_pretrained(folder)
    images, captions = vectors()
    return Search(folder, [png(picture) for picture in pictures], images.numpy(), captions.numpy())


@pytest.fixture(scope="module")
def cluster(search: Search, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = under(tmp_path_factory.mktemp("models"))
    models.add(
        "search",
        {
            "weights": {"path": str(search.folder)},
            "family": "dual-encoder",
            "inputs": ["text", "image"],
            "outputs": {"dense": WIDTH},
            "max_tokens": CLIP_TOKENS,
        },
    )
    with running(tmp_path_factory.mktemp("data"), *models.arguments, "--no-spare") as cluster:
        yield cluster


def test_the_served_ranking_is_the_librarys(cluster: Cluster, search: Search) -> None:
    """One request has all images, another one all captions. Each caption finds its image."""
    assert SIZE < 120
    batches = (
        [{"images": [base64.b64encode(file).decode()]} for file in search.files],
        [{"text": caption} for caption in CAPTIONS],
    )
    vectors = []
    for items in batches:
        answer = httpx.post(f"{cluster.url}/v1/encode/test/search", json={"items": items}, timeout=120)
        assert answer.status_code == 200, answer.text + cluster.log()
        vectors.append(np.array([item["dense"]["values"] for item in answer.json()["items"]], np.float32))
    images, captions = vectors
    assert np.abs(images - search.images).max() <= 1e-5
    assert np.abs(captions - search.captions).max() <= 1e-5
    ranked, expected = (
        np.argsort(-(queries @ targets.T), axis=1)
        for queries, targets in ((captions, images), (search.captions, search.images))
    )
    assert np.array_equal(ranked, expected)
    assert ranked[:, 0].tolist() == list(range(len(KINDS)))
