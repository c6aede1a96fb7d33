"""The blocks of image-search.md, with small random models under the names of the page: what they print is what the
library computes.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
import shared
import torch
from cluster import Cluster, until
from local_models import LocalModels
from pages import ROOT, blocks, run
from parity import qwen_checkpoints, test_qwen3_vl
from parity.toys import image, png
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, CLIPModel, ColPaliForRetrieval

pytestmark = shared.OPEN
PAGE = ROOT / "extras/models-vision/image-search.md"
PHOTOGRAPHS, PAGES, TOGETHER, RANKED = (block.code for block in blocks(PAGE, "python"))
PICTURES = {f"{number}.png": image(60 + 30 * number, 90 - 10 * number, number) for number in range(5)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the images."""
    for name, picture in PICTURES.items():
        (tmp_path / name).write_bytes(png(picture))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_photographs_are_found_by_words(open_cluster: Cluster, open_models: LocalModels, folder: Path) -> None:
    (folder / "broken.jpg").write_bytes(b"no image")
    weights = open_models.weights / "clip"
    model, processor = CLIPModel.from_pretrained(weights), AutoImageProcessor.from_pretrained(weights, backend="pil")
    tokens = AutoTokenizer.from_pretrained(weights)("a photo of a red square", return_tensors="pt")
    with torch.inference_mode():
        output = model(**tokens, **processor(images=list(PICTURES.values()), return_tensors="pt"))
    scores = (output.image_embeds @ output.text_embeds[0]).numpy()
    names = list(PICTURES)
    expected = [f"{names[place]} {scores[place]:.2f}" for place in np.argsort(-scores)[:3]]
    assert run(PHOTOGRAPHS, open_cluster) == expected


def test_pages_are_found_by_their_pictures(open_cluster: Cluster, open_models: LocalModels, folder: Path) -> None:
    weights = open_models.weights / "pages"
    model, processor = (
        ColPaliForRetrieval.from_pretrained(weights),
        AutoProcessor.from_pretrained(weights, backend="pil"),
    )
    batches = [processor.process_queries(["what is the total price?"])]
    batches += [processor.process_images([picture]) for picture in PICTURES.values()]
    with torch.inference_mode():
        query, *pages = (
            model(**{name: value for name, value in batch.items() if name != "labels"}).embeddings[0]
            for batch in batches
        )
    scores = processor.score_retrieval([query], pages)[0].numpy()
    names = list(PICTURES)
    expected = [f"{names[place]} {scores[place]:.1f}" for place in np.argsort(-scores)[:2]]
    assert run(PAGES, open_cluster) == expected


@pytest.fixture(scope="module")
def multimodal(open_cluster: Cluster, open_models: LocalModels) -> test_qwen3_vl.Oracle:
    """The library's model, which the cluster serves under both names of the page."""
    folder = open_models.weights / "qwen3-vl"
    if not folder.exists():
        qwen_checkpoints.qwen3_vl(folder)
    # these limits differ from those of the packaged entries
    limits = {"Qwen/Qwen3-VL-Embedding-2B": 300, "Qwen/Qwen3-VL-Reranker-2B": 301}
    for make, (name, limit) in zip((test_qwen3_vl.entry_of, test_qwen3_vl.reranker_of), limits.items(), strict=True):
        entry = msgspec.to_builtins(make(folder, name, max_tokens=limit))
        open_models.add(name.rpartition("/")[2], entry)
    until(
        lambda: all(
            httpx.get(f"{url}/v1/models/{name}", timeout=10).json()["max_sequence_length"] == limit
            for url in open_cluster.urls
            for name, limit in limits.items()
        ),
        shared.SERVED_S,
        "the models of the page to be replaced",
        open_cluster.log,
    )
    return test_qwen3_vl.Oracle(folder)


def test_a_text_and_its_images_are_one_vector(
    multimodal: test_qwen3_vl.Oracle, open_cluster: Cluster, folder: Path
) -> None:
    front, side = _sides(folder)
    offer, chair = multimodal.vector("a red square, 20 cm", [front, side]), multimodal.vector("a chair", [])
    query = multimodal.vector("a red square", [], "Find products that fit the query.")
    expected = [float(np.round(np.float32(vector @ query), 2)) for vector in (offer, chair)]
    assert run(TOGETHER, open_cluster) == [str(expected)]


def test_a_query_with_an_image_ranks_documents_with_images(
    multimodal: test_qwen3_vl.Oracle, open_cluster: Cluster, folder: Path
) -> None:
    front, side = _sides(folder)
    query = ("is this the same?", [front])
    scores = [multimodal.score(query, document) for document in (("a red square, 20 cm", [side]), ("a chair", []))]
    expected = [f"{place} {scores[place]:.2f}" for place in np.argsort(scores)[::-1]]
    assert run(RANKED, open_cluster) == expected


def _sides(folder: Path) -> list[Image.Image]:
    pictures = [PICTURES["0.png"], PICTURES["3.png"]]
    for name, picture in zip(("front.png", "side.png"), pictures, strict=True):
        (folder / name).write_bytes(png(picture))
    return pictures
