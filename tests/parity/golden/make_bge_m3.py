"""Write bge_m3.json: what FlagEmbedding gives for the checkpoint of `heads_checkpoints.bge_m3`.

    python make_bge_m3.py PYTHON ──► the checkpoint, here ──► PYTHON make_bge_m3.py --oracle FOLDER ──► bge_m3.json

PYTHON is the interpreter of an environment with FlagEmbedding 1.3.5, transformers 4.51.3, tokenizers 0.21.4,
huggingface_hub 0.36.0, datasets 3.6.0, peft 0.15.2, accelerate 1.6.0, and torch 2.13.0; FlagEmbedding does not run with
the transformers of this project.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("bge_m3.json")
WEIGHTS = [0.4, 0.2, 0.4]  # dense, sparse, colbert
TEXTS = [
    "",
    "river",
    "search engine",
    "naïve, (winter) it's",
    "river river mountain river",
    "a query of the worker",
    "<mask> token <pad>",
    (
        "kernel planet museum violin bridge contract harvest compiler recipe election harbour protein language physics "
        "history"
    ),
    "market signal, winter garden. music",
    "garden music",
    "vector " * 100,
    "東京 😀",
]
QUERIES = ["", "river engine", "winter garden music, a mountain", "vector " * 100]


def _oracle(folder: str, most: int) -> dict[str, Any]:
    from FlagEmbedding import BGEM3FlagModel

    model = BGEM3FlagModel(folder, use_fp16=False, devices="cpu")
    rows = []
    for text in TEXTS:  # one at a time: no padding
        output = model.encode([text], max_length=most, return_dense=True, return_sparse=True, return_colbert_vecs=True)
        rows.append(
            {
                "text": text,
                "ids": model.tokenizer(text, truncation=True, max_length=most)["input_ids"],
                "dense": _rounded(output["dense_vecs"][0]),
                "sparse": {key: _rounded(value) for key, value in output["lexical_weights"][0].items()},
                "multivector": _rounded(output["colbert_vecs"][0]),
            }
        )
    scores = []
    for query in QUERIES:
        pairs = [(query, text) for text in TEXTS]
        limits = {"max_query_length": most, "max_passage_length": most}
        output = model.compute_score(pairs, batch_size=1, weights_for_different_modes=WEIGHTS, **limits)
        modes = {"dense": "dense", "sparse": "sparse", "colbert": "colbert", "hybrid": "colbert+sparse+dense"}
        scores.append({"query": query, **{mode: _rounded(output[name]) for mode, name in modes.items()}})
    return {"texts": rows, "scores": scores}


def _rounded(values: Any) -> Any:
    if hasattr(values, "tolist"):
        values = values.tolist()
    return [_rounded(value) for value in values] if isinstance(values, list) else round(float(values), 7)


def main() -> None:
    """Run one of the two steps that the docstring of the module shows."""
    if sys.argv[1] == "--oracle":
        TARGET.write_text(json.dumps(_oracle(sys.argv[2], int(sys.argv[3])), separators=(",", ":")) + "\n")
        return
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from parity.heads_checkpoints import M3_TOKENS, bge_m3

    with tempfile.TemporaryDirectory() as place:
        folder = bge_m3(Path(place) / "bge-m3")
        config = folder / "tokenizer_config.json"  # the older transformers does not know the name of the class
        config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
        subprocess.run([sys.argv[1], __file__, "--oracle", str(folder), str(M3_TOKENS)], check=True)


if __name__ == "__main__":
    main()
