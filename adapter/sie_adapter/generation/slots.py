"""KV cache of the sequences that a model generates at the same time. Each sequence is a row with its own slot in the
cache, so that rows can start and end at different steps.

    states of a row's prompt ──► add ──► [slots, heads, positions, width], of each layer
    a step ──► cache: the states of all rows as views ──► each row's new state at its own end ──► advance
    a row that leaves ──► remove: the last row moves into its slot

The slots in use are always the first ones, so a step does not copy earlier states. The positions of each row begin at 0
and do not depend on the other rows. Positions after the end of a row are masked.

Each row needs memory for the length of the longest row that runs at the same time. Memory for several rows is allocated
only if `fits` allows it: on a CPU no allocator refuses memory, and the kernel would kill the process. A single row
always gets the memory that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

_STEP = 64  # allocations and masks have a multiple of this number of positions, so most steps allocate nothing
_GROWTH = 1.5  # if memory allows, a new allocation multiplies the number of positions by at least this factor

States = Sequence[tuple[Tensor, Tensor]]  # keys and values of each layer, [1, heads, positions, width]
Fits = Callable[[int], bool]  # returns True if the device may use this number of additional bytes


class SlotsFull(MemoryError):
    """Raised if the device has too little memory for these rows together. The slots are unchanged."""


def unbounded(more_bytes: int) -> bool:
    return True


class RowStart(NamedTuple):
    """State of a row after the pass over its prompt. `own`: keys and values of the prompt. `encoder_states`: keys and
    values of the encoder's states, if the model has an encoder. `logits` [vocabulary]: scores of the first generated
    token. `shift`: the position of a token minus its index in the row.
    """

    own: States
    logits: Tensor
    encoder_states: States = ()
    shift: int = 0


def prompted(caches: Cache) -> tuple[States, States]:
    """Return keys and values of decoder and encoder from transformers' caches, after a pass over a prompt."""
    if isinstance(caches, EncoderDecoderCache):
        return _states(caches.self_attention_cache), _states(caches.cross_attention_cache)
    return _states(caches), ()


def empty(*, has_encoder: bool = False) -> Cache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if has_encoder else DynamicCache()


def _states(cache: Cache) -> States:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _whole(positions: int) -> int:
    return -(-positions // _STEP) * _STEP


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # the type checker skips transformers
    is_sliding = False

    def __init__(self, states: _SlotStates, number: int) -> None:
        super().__init__()
        self._states, self._number = states, number
        self.is_initialized = True

    @property
    def keys(self) -> Tensor:
        return self._states.view(self._number)[0]

    @keys.setter
    def keys(self, value: None) -> None:
        """Ignore the value: the base class assigns None to clear the keys."""

    @property
    def values(self) -> Tensor:
        return self._states.view(self._number)[1]

    @values.setter
    def values(self, value: None) -> None:
        """Ignore the value: the base class assigns None to clear the values."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("lazy_initialization is not supported: the layer gets its states when it is created")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Write the new state of each row, [rows, heads, 1, width], at the end of the row."""
        self._states.write(self._number, key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._states.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._states.width, 0

    def get_max_length(self) -> int:
        return -1


class _SlotStates:
    """Keys and values of all rows, from decoder or encoder states: [slots, heads, positions, width] for each layer."""

    def __init__(self, fits: Fits) -> None:
        self.lengths: list[int] = []
        self._fits = fits
        self._layers: list[tuple[Tensor, Tensor]] = []
        # `lengths` on the device, [rows]; None after a row was added or removed, until the next step
        self._ends: Tensor | None = None
        self.width = 0  # number of positions that the model sees in this step

    def make_room(self, states: States) -> None:
        """Allocate memory for one more row with these states. Raises SlotsFull."""
        self._reserve(states, len(self.lengths) + 1, max(states[0][0].shape[2] + 1, *self.lengths, 1))

    def add(self, states: States) -> None:
        """Add a row. The memory for the row must be allocated before this call."""
        length, slot = states[0][0].shape[2], len(self.lengths)
        for (keys, values), (own_keys, own_values) in zip(self._layers, states, strict=True):
            keys[slot, :, :length] = own_keys[0]
            values[slot, :, :length] = own_values[0]
        self.lengths.append(length)
        self._ends = None

    def remove(self, slot: int) -> None:
        last = len(self.lengths) - 1
        if slot != last:
            length = self.lengths[last]
            for keys, values in self._layers:
                keys[slot, :, :length] = keys[last, :, :length]
                values[slot, :, :length] = values[last, :, :length]
        self.lengths[slot] = self.lengths[last]
        self.lengths.pop()
        self._ends = None
        if not self.lengths:
            self._layers = []

    def needed_bytes(self, rows: int, length: int) -> int:
        """Return the additional bytes that `rows` more rows need. Each row needs `length` positions, or more if a
        present row is longer. Without a present row the size of a position is unknown, and the result is 0.
        """
        if not self._layers:
            return 0
        slots, positions = len(self.lengths) + rows, max(length, *self.lengths, 0) + 1
        has_slots, has_positions = self._sizes()
        if slots <= has_slots and positions <= has_positions:
            return 0
        return self._more_bytes(self._layers, slots, _whole(positions))

    def _sizes(self) -> tuple[int, int]:
        return self._layers[0][0].shape[0:3:2] if self._layers else (0, 0)

    def _more_bytes(self, states: States, slots: int, positions: int) -> int:
        """Return the peak of additional bytes in use while `_reserve` allocates these slots and positions."""
        has_slots, has_positions = self._sizes()
        position_bytes: int = sum(
            side.shape[1] * side.shape[3] * side.element_size() for layer in states for side in layer
        )
        held = has_slots * has_positions * position_bytes
        return slots * positions * position_bytes - held + held // len(states)

    def _reserve(self, states: States, slots: int, positions: int) -> None:
        """Allocate memory for at least `slots` slots and `positions` positions. Fill it with zeros, because masked
        values must be finite. Raises SlotsFull.
        """
        has_slots, has_positions = self._sizes()
        if slots <= has_slots and positions <= has_positions:
            return
        ample_slots = has_slots if slots <= has_slots else max(slots, 2 * has_slots)
        ample_positions = has_positions if positions <= has_positions else max(positions, int(_GROWTH * has_positions))
        needed, ample = (slots, _whole(positions)), (ample_slots, _whole(ample_positions))
        if self._fits(self._more_bytes(states, *ample)):
            slots, positions = ample
        elif slots == 1 or self._fits(self._more_bytes(states, *needed)):
            slots, positions = needed
        else:
            raise SlotsFull(f"the memory is too small for the KV cache of {slots} texts of {positions} tokens")
        used = len(self.lengths)

        def grown(old: Tensor | None, like: Tensor) -> Tensor:
            new = like.new_zeros(slots, like.shape[1], positions, like.shape[3])
            if old is not None:
                copied = min(positions, old.shape[2])
                new[:used, :, :copied] = old[:used, :, :copied]
            return new

        before: list[Any] = self._layers or [(None, None)] * len(states)
        self._layers = []
        for number, (keys, values) in enumerate(states):
            old_keys, old_values = before[number]
            self._layers.append((grown(old_keys, keys), grown(old_values, values)))
            # free the old states of this layer before the next layer is copied, so that only one layer at a time exists
            # twice
            before[number] = (None, None)

    def ready(self) -> None:
        """Begin a step: allocate memory for one more position in each row."""
        self._reserve(self._layers, len(self.lengths), max(self.lengths) + 1)
        self.open(max(self.lengths) + 1)

    def open(self, needed: int) -> None:
        """Make the first `needed` positions of the cache visible to the model. If a row is shorter than `needed`, the
        step needs a mask in any case. The number of visible positions is then rounded up to a multiple of _STEP, and
        the mask also hides the added positions.
        """
        keys = self._layers[0][0]
        is_even = min(self.lengths) == needed
        self.width = needed if is_even else min(keys.shape[2], _whole(needed))
        if self._ends is None:
            self._ends = torch.tensor(self.lengths, device=keys.device)

    @property
    def ends(self) -> Tensor:
        assert self._ends is not None
        return self._ends

    def view(self, number: int) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[number]
        return keys[: len(self.lengths), :, : self.width], values[: len(self.lengths), :, : self.width]

    def write(self, number: int, new_keys: Tensor, new_values: Tensor) -> None:
        keys, values = self._layers[number]
        rows = torch.arange(len(self.lengths), device=keys.device)
        keys[rows, :, self.ends] = new_keys[:, :, 0]
        values[rows, :, self.ends] = new_values[:, :, 0]

    def advance(self) -> None:
        self.lengths = [length + 1 for length in self.lengths]
        self._ends = self.ends + 1

    def mask(self, *, with_next: bool) -> Tensor:
        """Return True at the positions that a row attends to, bool [rows, 1, 1, width]. `with_next` adds the position
        of the new token.
        """
        places = torch.arange(self.width, device=self.ends.device)
        ends = self.ends[:, None]
        return (places <= ends if with_next else places < ends)[:, None, None]

    def cache(self) -> Cache:
        return Cache(layers=[_Layer(self, number) for number in range(len(self._layers))])


class DecoderSlots:
    """Slots with the keys and values of the rows of one model, for one thread. A step has three parts: the call of
    `ready`, a pass of the model with `cache`, `positions` and the masks, and the call of `advance`. If a step fails
    before `advance`, no row has changed.
    """

    def __init__(self, fits: Fits = unbounded) -> None:
        self._fits = fits
        self._own, self._encoder_states = _SlotStates(fits), _SlotStates(fits)
        self._shifts: list[int] = []

    def __len__(self) -> int:
        return len(self._shifts)

    def has_room(self, rows: int, length: int) -> bool:
        """Return whether `rows` additional rows, with prompts of at most `length` tokens, fit into memory. Return True
        if no row is present: the bytes that a row needs are then unknown.
        """
        needed_bytes = self._own.needed_bytes(rows, length) + self._encoder_states.needed_bytes(rows, 0)
        return not needed_bytes or self._fits(needed_bytes)

    def add(self, begun: RowStart) -> None:
        """Add a row in the last slot. Raises SlotsFull if the row does not fit into memory."""
        self._own.make_room(begun.own)
        if begun.encoder_states:
            self._encoder_states.make_room(begun.encoder_states)
        self._own.add(begun.own)
        if begun.encoder_states:
            self._encoder_states.add(begun.encoder_states)
        self._shifts.append(begun.shift)

    def remove(self, slot: int) -> None:
        """Remove a row. The last row moves into the free slot."""
        self._own.remove(slot)
        if self._encoder_states.lengths:
            self._encoder_states.remove(slot)
        self._shifts[slot] = self._shifts[-1]
        self._shifts.pop()

    def ready(self) -> None:
        """Begin a step. Raises SlotsFull if the rows have become too long to run together."""
        self._own.ready()
        if self._encoder_states.lengths:
            self._encoder_states.open(max(self._encoder_states.lengths))

    def advance(self) -> None:
        self._own.advance()

    def cache(self) -> Cache:
        own = self._own.cache()
        if not self._encoder_states.lengths:
            return own
        both = EncoderDecoderCache(own, self._encoder_states.cache())
        both.is_updated = dict.fromkeys(range(len(own.layers)), True)
        return both

    @property
    def positions(self) -> Tensor:
        """Return the position of the token that each row gets in this step, [rows, 1]."""
        ends = self._own.ends
        return (ends + torch.tensor(self._shifts, device=ends.device))[:, None]

    @property
    def mask(self) -> Tensor:
        """Return the mask that limits each row to its own positions, bool [rows, 1, 1, positions]."""
        return self._own.mask(with_next=True)

    @property
    def seen_mask(self) -> Tensor:
        """Return the mask that limits each row to the states of its own encoder pass, bool [rows, 1, 1, positions]."""
        return self._encoder_states.mask(with_next=False)
