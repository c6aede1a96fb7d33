"""Vectors of open_clip 3.3.0 with timm 1.0.31 for test_dual_encoder.py, written to marqo.json beside this file. Both
import torchvision, which the environment of the tests does not have.

    PYTHONPATH=tests:extras/models-vision/tests python extras/models-vision/tests/parity/golden/make_marqo.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import open_clip
import timm
import torch
from open_clip.model import CustomTextCLIP
from open_clip.tokenizer import get_clean_fn
from open_clip.transform import PreprocessCfg, image_transform_v2
from parity import dual_checkpoints
from parity.dual_checkpoints import OPEN_CLIP_WIDTH, PATCH, SIZE
from parity.open_clip_cases import SIZES, TEXTS
from parity.toys import image
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast


class Tower(nn.Module):
    """Tower as open_clip's TimmModel without a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = timm.models.vision_transformer.VisionTransformer(
            img_size=SIZE,
            patch_size=PATCH,
            embed_dim=OPEN_CLIP_WIDTH,
            depth=2,
            num_heads=2,
            class_token=False,
            global_pool="map",
            num_classes=0,
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return self.trunk(pixels)


def main() -> None:
    folder = dual_checkpoints.marqo(Path(tempfile.mkdtemp()) / "marqo")
    config = json.loads((folder / "open_clip_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="</s>")
    text: dict[str, Any] = {**config["model_cfg"]["text_cfg"], "vocab_size": len(tokenizer), "width": 48, "layers": 2}
    small = {"image_size": SIZE, "layers": 1, "width": 64, "head_width": 64, "patch_size": PATCH}
    model = CustomTextCLIP(OPEN_CLIP_WIDTH, small, text, init_logit_bias=-10)
    model.visual = Tower()
    model.load_state_dict(load_file(folder / "open_clip_model.safetensors"), strict=True)
    model.eval()
    transform = image_transform_v2(PreprocessCfg(size=SIZE, **config["preprocess_cfg"]), is_train=False)
    clean = get_clean_fn("canonicalize")
    with torch.inference_mode():
        pixels = torch.stack([transform(image(*size, seed)) for seed, size in enumerate(SIZES)])
        ids = tokenizer(
            [clean(text) for text in TEXTS],
            max_length=config["model_cfg"]["text_cfg"]["context_length"],
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        ).input_ids
        vectors = {
            "images": model.encode_image(pixels, normalize=True),
            "texts": model.encode_text(ids, normalize=True),
        }
    rounded = {name: [[round(x, 7) for x in row] for row in rows.tolist()] for name, rows in vectors.items()}
    target = Path(__file__).with_name("marqo.json")
    target.write_text(json.dumps({"open_clip": open_clip.__version__, "timm": timm.__version__, **rounded}))


if __name__ == "__main__":
    main()
