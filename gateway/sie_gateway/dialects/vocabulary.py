"""Conversion of token ids of OpenAI's models to text. The vocabularies are data files of an installed package. SIE
never runs the package's code.

A file has a line for each token: its bytes in base64, and its id. Digests and special tokens are the same as in
tiktoken (tiktoken_ext/openai_public.py).
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from sie_contracts.errors import InvalidInput

_PACKAGE = "bpe_openai"  # module of the package bpe-openai on PyPI
_DIGESTS = {
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}
_SPECIAL = {
    "cl100k_base": {
        100257: b"<|endoftext|>",
        100258: b"<|fim_prefix|>",
        100259: b"<|fim_middle|>",
        100260: b"<|fim_suffix|>",
        100276: b"<|endofprompt|>",
    },
    "o200k_base": {199999: b"<|endoftext|>", 200018: b"<|endofprompt|>"},
}
NAMES = tuple(_DIGESTS)
OWN_IDS = "for ids of the model's own tokenizer, set token_encoding (or openai_token_encoding of its entry) to `model`"


def path(name: str) -> Path | None:
    """Return the path of a vocabulary, a gzip file; None if the package is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    file = Path(spec.origin).parent / "data" / f"{name}.tiktoken.gz" if spec and spec.origin else None
    return file if file and file.is_file() else None


@functools.cache
def load(name: str) -> dict[int, bytes]:
    """Return the bytes of each token by its id. The first call takes 0.1 s and 20 MiB of memory. Raises InvalidInput if
    the vocabulary is not installed, or has the wrong digest.
    """
    file = path(name)
    if file is None:
        message = (
            f"this gateway cannot read ids of {name}: send texts, or install sie-cluster[openai-tokens]"
            f" with the gateway; {OWN_IDS}"
        )
        raise InvalidInput.at("token_encoding", message, reason="unsupported_modality")
    data = gzip.decompress(file.read_bytes())
    if hashlib.sha256(data).hexdigest() != _DIGESTS[name]:
        message = f"the installed vocabulary {name} differs from the published file: install {_PACKAGE} again"
        raise InvalidInput.at("token_encoding", message, reason="unsupported_modality")
    pairs = (line.split() for line in data.splitlines())
    return {int(number): base64.b64decode(token) for token, number in pairs} | _SPECIAL[name]


def decode(name: str, ids: Sequence[int], where: str) -> str:
    """Return the text of `ids`, with U+FFFD for incomplete characters. Raises InvalidInput for an unknown id."""
    table = load(name)
    try:
        return b"".join([table[token] for token in ids]).decode("utf-8", "replace")
    except KeyError:
        place = next(index for index, token in enumerate(ids) if token not in table)
        message = f"{where}[{place}]: expected an id of {name}, got {ids[place]}; {OWN_IDS}"
        raise InvalidInput(message, reason="bad_token_id", param=where) from None
