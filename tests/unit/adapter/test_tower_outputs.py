"""Outputs of a tower for an image are reused for the next question about it, by the same client alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from sie_adapter.packed.packing import Shown
from sie_adapter.packed.tower_outputs import PAUSE_S, Output, OutputsOfTower, TowerOutputs

WIDTH = 4
BYTES = 4 * WIDTH  # the size of one output


def image(value: int, key: bytes | None = None, height: int = 10) -> Shown:
    """Return an image whose key is made of `value`, unless there is a `key`."""
    return Shown(np.full((1, 1, 3), value, np.uint8), height, 10, bytes([value]) * 16 if key is None else key)


class Counting:
    """A tower whose output repeats the value of an image WIDTH times. `read` lists the images of each call."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def __call__(self, images: Sequence[Shown]) -> list[Output]:
        values = [int(picture.pixels[0, 0, 0]) for picture in images]
        self.read.append(values)
        return [(row,) for row in torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, WIDTH).contiguous()]


def values(outputs: Sequence[Output]) -> list[float]:
    assert all(tensor.shape == (WIDTH,) for (tensor,) in outputs)
    return [float(tensor[0]) for (tensor,) in outputs]


def test_ten_questions_to_one_page_read_it_once() -> None:
    """The questions come in one batch, and then one after the other."""
    shared, read = TowerOutputs(1000), Counting()
    outputs = shared.of_tower()
    assert values(outputs.for_images([image(7)] * 10, read)) == [7.0] * 10
    assert [values(outputs.for_images([image(7)], read)) for _ in range(10)] == [[7.0]] * 10
    assert read.read == [[7]]
    assert (shared.hits, shared.misses) == (19, 1)


def test_nothing_is_shared_that_has_another_key_size_or_tower() -> None:
    """The key names the client. Equal pixels may come from pictures of different sizes, which a tower may read."""
    shared, read = TowerOutputs(1000), Counting()
    outputs = shared.of_tower()
    outputs.for_images([image(1), image(1, b"other"), image(1, height=11)], read)
    shared.of_tower().for_images([image(1)], read)
    assert read.read == [[1, 1, 1], [1]]


def test_an_image_without_a_key_is_read_each_time() -> None:
    shared, read = TowerOutputs(1000), Counting()
    outputs = shared.of_tower()
    assert values(outputs.for_images([image(1, b""), image(2, b"")], read)) == [1.0, 2.0]
    outputs.for_images([image(1, b""), image(1, b"")], read)
    assert read.read == [[1, 2], [1, 1]]
    assert shared.use().held_bytes == 0


def test_no_more_is_kept_than_the_bound_and_what_was_not_used_for_longest_goes() -> None:
    """The bound holds over all towers."""
    shared, read = TowerOutputs(3 * BYTES), Counting()
    first, second = shared.of_tower(), shared.of_tower()
    first.for_images([image(1)], read)
    second.for_images([image(2)], read)
    first.for_images([image(3)], read)
    first.for_images([image(1)], read)
    assert shared.use().held_bytes == 3 * BYTES
    read.read.clear()
    second.for_images([image(4)], read)  # drops the output of image 2
    first.for_images([image(1), image(3)], read)
    second.for_images([image(2)], read)
    assert read.read == [[4], [2]]
    assert shared.use().held_bytes == 3 * BYTES


@pytest.mark.parametrize("max_bytes", [0, BYTES - 1])
def test_an_output_that_is_too_large_serves_its_own_batch_alone(max_bytes: int) -> None:
    shared, read = TowerOutputs(max_bytes), Counting()
    outputs = shared.of_tower()
    assert values(outputs.for_images([image(1), image(1)], read)) == [1.0, 1.0]
    outputs.for_images([image(1)], read)
    assert read.read == [[1], [1]]
    assert shared.use().held_bytes == 0


def test_where_memory_was_short_nothing_is_kept_for_a_while() -> None:
    now_s = 0.0
    shared, read = TowerOutputs(1000, lambda: now_s), Counting()
    outputs = shared.of_tower()
    outputs.for_images([image(1)], read)
    assert shared.clear()
    assert shared.use().held_bytes == 0
    assert not shared.clear()
    outputs.for_images([image(1)], read)
    assert shared.use().held_bytes == 0
    now_s = PAUSE_S
    outputs.for_images([image(1)], read)
    assert shared.use().held_bytes == BYTES
    assert read.read == [[1]] * 3


def test_an_output_that_is_not_finite_is_made_again() -> None:
    """An overflow of another image in the batch must not stay in the cache."""
    outputs, read = TowerOutputs(1000).of_tower(), Counting()

    def overflowing(images: Sequence[Shown]) -> list[Output]:
        return [(tensor * torch.inf,) for (tensor,) in read(images)]

    assert values(outputs.for_images([image(1)], overflowing)) == [float("inf")]
    assert values(outputs.for_images([image(1)], read)) == [1.0]
    assert values(outputs.for_images([image(1)], overflowing)) == [1.0]
    assert read.read == [[1], [1]]


class Held:
    """A tower that reads an image once `go` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self._error = error

    def __call__(self, images: Sequence[Shown]) -> list[Output]:
        self.began.set()
        assert self.go.wait(30)
        if self._error is not None:
            raise self._error
        return Counting()(images)


def start_read(
    outputs: OutputsOfTower, picture: Shown, read: Held | Counting, numbers: list[float]
) -> threading.Thread:
    def run() -> None:
        try:
            numbers.extend(values(outputs.for_images([picture], read)))
        except MemoryError:
            numbers.append(-1.0)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.timeout(60)
@pytest.mark.parametrize("max_bytes", [1000, 0])
def test_two_threads_read_a_page_once(max_bytes: int) -> None:
    shared, held, read = TowerOutputs(max_bytes), Held(), Counting()
    outputs, numbers = shared.of_tower(), [0.0][:0]
    first = start_read(outputs, image(5), held, numbers)
    assert held.began.wait(30)
    second = start_read(outputs, image(5), read, numbers)
    second.join(0.05)
    assert second.is_alive()
    assert values(outputs.for_images([image(6)], read)) == [6.0]  # other images do not wait
    held.go.set()
    first.join()
    second.join()
    assert numbers == [5.0, 5.0]
    assert read.read == [[6]]
