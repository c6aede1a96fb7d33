"""A new user follows the guides word by word: every command is pasted, and prints what the page shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import local_models
import pages
import pytest
import yaml
from hub_stub import HubStub
from local_models import LocalModels
from object_stores import Moto
from oracle import model_folder
from pages import DOCS, ROOT, Reader
from peft import LoraConfig, get_peft_model
from transformers import AutoModel

pytestmark = [
    pages.WHOLE,
    pytest.mark.timeout(400),  # each step has its own bound
    # PEFT reads this attribute of transformers
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
# sdk.md by test_readme.py, schemas.md by test_schemas.py
ELSEWHERE = (
    "quickstart.md",
    "coming-from.md",
    "bundles.md",
    "tuning.md",
    "sdk.md",
    "schemas.md",
)
# those that want a server of their own come last
OTHERS = sorted(
    (page for page in DOCS.glob("*.md") if pages.runs(page) and page.name not in ELSEWHERE),
    key=lambda page: (pages.marks(page)["server"], page.name),
)
HUB = ("BAAI/bge-small-en-v1.5", "intfloat/e5-small-v2", "thenlper/gte-small")
COMMIT = yaml.safe_load((ROOT / "catalog/models/intfloat/e5-small-v2.yaml").read_text("utf-8"))["weights"]["revision"]
LORA = "saivamshiatukuri/bge-m3-banking77-lora"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BAAI/bge-m3": ("m3", {"profiles": {"banking": {"run": {"lora": LORA}}}}),
    "colbert-ir/colbertv2.0": ("late", {}),
    "urchade/gliner_multi_pii-v1": ("gliner", {}),
}


@pytest.mark.long
def test_the_quickstart_and_what_others_change_for_it(tmp_path: Path) -> None:
    """The quickstart starts one cluster. The page for users of other servers is read beside it."""
    with Reader(tmp_path) as reader:
        reader.read(DOCS / "quickstart.md")
        reader.read(DOCS / "coming-from.md")
        assert reader.ran == 11


@pytest.mark.long
@pytest.mark.parametrize(("page", "count"), [("bundles.md", 3), ("tuning.md", 7)])
def test_a_page_with_a_cluster_of_its_own(tmp_path: Path, page: str, count: int) -> None:
    with Reader(tmp_path) as reader:
        reader.read(DOCS / page)
    assert reader.ran == count


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader with a hub and a bucket on this machine. Models that would be fetched are small ones of their kinds,
    under the same names.
    """
    folder = tmp_path_factory.mktemp("reader")
    models = LocalModels(folder / "models", folder / "weights")
    for directory in (models.folder, models.weights):
        directory.mkdir()
    for name, (kind, more) in MODELS.items():
        models.add(kind, {**local_models.KINDS[kind](models.weights / kind), **more, "id": name})
    hub, bucket = HubStub(commit=COMMIT), Moto()
    httpx.put(f"{bucket.url}/my-bucket", trust_env=False, timeout=60).raise_for_status()
    for name in HUB:
        hub.add(name, model_folder())
    shutil.copytree(model_folder(), folder / "my-model")
    base = AutoModel.from_pretrained(models.weights / "m3")
    lora = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=64, target_modules=["query", "value"], init_lora_weights=False)
    )
    lora.save_pretrained(folder / "lora")
    hub.add(LORA, folder / "lora")
    shutil.rmtree(folder / "lora")
    try:
        with hub.serving(), Reader(folder, {**bucket.environ, "HF_ENDPOINT": hub.url}) as reader:
            yield reader
    finally:
        bucket.close()


@pytest.mark.long
@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_a_page_is_followed(page: Path, reader: Reader) -> None:
    before = reader.ran
    reader.read_beside(page)
    assert reader.ran - before == pages.runs(page)
