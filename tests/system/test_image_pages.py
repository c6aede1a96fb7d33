"""The blocks of docs/image-search.md, with small random models under the names of the page: what they print is what the
library computes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import shared
import torch
from cluster import Cluster
from local_models import LocalModels
from pages import DOCS, blocks, run
from parity.dual_checkpoints import image, png
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, CLIPModel, ColPaliForRetrieval

pytestmark = shared.OPEN
PHOTOGRAPHS, PAGES = (block.code for block in blocks(DOCS / "image-search.md", "python"))
PICTURES = {f"{number}.png": image(60 + 30 * number, 90 - 10 * number, number) for number in range(5)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The images, and a file that is none."""
    for name, picture in PICTURES.items():
        (tmp_path / name).write_bytes(png(picture))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_photographs_are_found_by_words(open_cluster: Cluster, open_models: LocalModels, folder: Path) -> None:
    (folder / "broken.jpg").write_bytes(b"no image")
    weights = open_models.weights / "clip"
    model, processor = CLIPModel.from_pretrained(weights), AutoImageProcessor.from_pretrained(weights, backend="pil")
    asked = AutoTokenizer.from_pretrained(weights)("a photo of a red square", return_tensors="pt")
    with torch.inference_mode():
        found = model(**asked, **processor(images=list(PICTURES.values()), return_tensors="pt"))
    scores = (found.image_embeds @ found.text_embeds[0]).numpy()
    names = list(PICTURES)
    expected = [f"{names[place]} {scores[place]:.2f}" for place in np.argsort(-scores)[:3]]
    assert run(PHOTOGRAPHS, open_cluster) == expected


def test_pages_are_found_by_their_pictures(open_cluster: Cluster, open_models: LocalModels, folder: Path) -> None:
    weights = open_models.weights / "pages"
    model, processor = (
        ColPaliForRetrieval.from_pretrained(weights),
        AutoProcessor.from_pretrained(weights, backend="pil"),
    )
    asked = [processor.process_queries(["what is the total price?"])]
    asked += [processor.process_images([picture]) for picture in PICTURES.values()]
    with torch.inference_mode():
        query, *pages = (
            model(**{name: value for name, value in each.items() if name != "labels"}).embeddings[0] for each in asked
        )
    scores = processor.score_retrieval([query], pages)[0].numpy()
    names = list(PICTURES)
    expected = [f"{names[place]} {scores[place]:.1f}" for place in np.argsort(-scores)[:2]]
    assert run(PAGES, open_cluster) == expected
