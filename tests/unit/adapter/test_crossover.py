"""The text length at which attention takes as long as all other layers, from a model's configuration."""

from __future__ import annotations

import pytest
from transformers import BertConfig, MistralConfig, ModernBertConfig, PretrainedConfig, Qwen3Config

from sie_adapter.packed.backbone import _crossover_tokens


@pytest.mark.parametrize(
    ("config", "widths"),
    [
        (BertConfig(hidden_size=384), 3),
        (ModernBertConfig(hidden_size=768, num_hidden_layers=3), 9),  # the first of three attends to the whole text
        (Qwen3Config(hidden_size=1024), 3),
        (MistralConfig(hidden_size=1024, sliding_window=4096), 0),
        (MistralConfig(hidden_size=1024, sliding_window=None), 3),
    ],
    ids=lambda param: type(param).__name__ if isinstance(param, PretrainedConfig) else str(param),
)
def test_layers_that_attend_to_a_window_are_left_out(config: PretrainedConfig, widths: int) -> None:
    assert _crossover_tokens(config) == widths * config.hidden_size
