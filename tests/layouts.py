"""A placement table that a new `Layout` computes, as a pure function."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sie_contracts.hosts import Holdings
from sie_contracts.models.layout import Layout

Table = dict[str, tuple[str, ...]]


def place(
    prev: Mapping[str, tuple[str, ...]],
    counts: Mapping[str, int],
    workers: Mapping[str, Holdings],
    demand: Mapping[str, float],
    slots: Mapping[str, int],
) -> Table:
    """Return the hosts of each model of `counts`: as many live workers as it needs, or all of them.

    `prev`: the table before. `counts`: hosts per model, at least 1. `workers`: the live workers. `demand`: the demand
    of each model in workers (1.0 keeps one worker busy); missing is 0. `slots`: how many models fit on a worker at
    once; 0 or missing is no bound.
    """
    layout = Layout()
    for name, holdings in workers.items():
        layout.set_worker(name, holdings, slots.get(name, 0))
    for model, count in counts.items():
        layout.set_model(model, count)
        layout.set_before(model, prev.get(model, ()))
    demands = np.zeros(layout.size)
    for model, load in demand.items():
        if model in layout.indices:
            demands[layout.indices[model]] = load
    layout.settle(demands)
    return {model: layout.rows[model].before for model in sorted(layout.rows)} if workers else {}
