"""Encoding of a cached answer in msgpack: the bytes of each array, the score, the JSON data of an extraction, and the
number of tokens that the model read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sie_contracts.wire.messages import ArraySlice, Ok, WorkResult
from sie_gateway.inference.reply import array_of


class PackedAnswer(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """Answer to one input that did not fail. `arrays`: dtype, shape and bytes by name of the output."""

    arrays: dict[str, tuple[str, tuple[int, ...], bytes]]
    score: float | None = None
    data: dict[str, Any] | None = None
    tokens: int = 0
    truncated: bool = False
    first_of_several: bool = False
    sound_s: float = 0.0


_decode = msgspec.msgpack.Decoder(PackedAnswer).decode


def pack(result: WorkResult, outcome: Ok) -> bytes:
    """Encode the answer to one input of a request. The bytes of its arrays are copied, so that the cache does not keep
    the worker's whole result in memory.
    """
    arrays = {
        name: (piece.dtype, piece.shape, array_of(result, outcome, name).tobytes())
        for name, piece in outcome.outputs.items()
    }
    return msgspec.msgpack.encode(
        PackedAnswer(
            arrays,
            outcome.score,
            outcome.data,
            outcome.tokens,
            outcome.truncated,
            outcome.first_of_several,
            outcome.sound_s,
        )
    )


def unpack(packed: bytes, fingerprint: str) -> WorkResult:
    """Decode a cached answer and return it as the result of a chunk with one input. The chunk has the number -1,
    because no worker ran it.
    """
    decoded = _decode(packed)
    outputs: dict[str, ArraySlice] = {}
    size = 0
    for name, (dtype, shape, data) in decoded.arrays.items():
        outputs[name] = ArraySlice(dtype, shape, size)
        size += len(data)
    block = b"".join([data for _, _, data in decoded.arrays.values()])
    outcome = Ok(
        outputs,
        decoded.tokens,
        decoded.truncated,
        decoded.score,
        decoded.data,
        decoded.first_of_several,
        decoded.sound_s,
    )
    return WorkResult("", -1, "", (outcome,), block, fingerprint=fingerprint)
