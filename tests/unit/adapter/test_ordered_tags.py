"""The tags from which the privacy filter's entities are read, against the best of all ordered sequences."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from sie_adapter.families.entities import ordered_tags

TAGS = ("O", "B-a", "I-a", "E-a", "S-a", "B-b", "I-b", "E-b", "S-b")


def is_ordered(tags: tuple[str, ...]) -> bool:
    is_open = ""
    for tag in tags:
        kind, label = tag[:1], tag[2:]
        if is_open:
            if kind not in "IE" or label != is_open:
                return False
        elif kind in "IE":
            return False
        is_open = label if kind in "BI" else ""
    return not is_open


def test_tags_are_the_best_sequence_of_all_that_are_in_order() -> None:
    sequences = [
        numbers
        for numbers in itertools.product(range(9), repeat=4)
        if is_ordered(tuple(TAGS[number] for number in numbers))
    ]
    numbers = np.array(sequences)
    generator = torch.Generator().manual_seed(3)
    differs = 0
    for _ in range(60):
        scores = torch.randn(4, 9, generator=generator).log_softmax(1)
        sums = scores.double().numpy()[np.arange(4), numbers].sum(1)
        tags = ordered_tags(scores, TAGS).tolist()
        assert tags == numbers[sums.argmax()].tolist()
        differs += tags != scores.argmax(1).tolist()
    assert differs > 10


def test_impossible_tags_leave_a_sequence_in_order() -> None:
    """Probabilities of 0 have the logarithm minus infinity."""
    scores = torch.full((3, 9), -torch.inf)
    scores[:, 2] = 0.0
    assert is_ordered(tuple(TAGS[number] for number in ordered_tags(scores, TAGS).tolist()))
    assert ordered_tags(torch.zeros(0, 9), TAGS).tolist() == []
    assert ordered_tags(torch.zeros(1, 9), TAGS).tolist()[0] in (0, 4, 8)
