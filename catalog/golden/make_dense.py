"""Golden vectors for one entry, computed by sentence-transformers in float32 on the CPU and written as JSON.

    python catalog/golden/make_dense.py FOLDER OUT.json

Vectors are normalised and rounded to nine digits, more than float32 has. The texts have no prompt, because no case has
`is_query`. One text is empty, one has a line break, one has characters beyond ASCII, and one has 400 words, to exceed
the limits of small models.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

TEXTS = (
    "test",
    "What is Deep Learning?",
    "Deep Learning is...",
    "",
    "First line.\nSecond line.",
    "Zürich, 東京 and 😀",
    " ".join(["retrieval"] * 400),
)


def main(folder: str, out: str) -> None:
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32})
    # one by one, so that no text is padded
    vectors = [model.encode([text], normalize_embeddings=True, show_progress_bar=False)[0] for text in TEXTS]
    cases = [
        {"text": text, "vector": [float(f"{value:.9g}") for value in vector]}
        for text, vector in zip(TEXTS, vectors, strict=True)
    ]
    made_by = (
        f"catalog/golden/make_dense.py, sentence-transformers {version('sentence-transformers')}, torch "
        f"{version('torch')}, float32"
    )
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    Path(out).write_text(f'{{"made_by": {json.dumps(made_by)}, "dense": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
