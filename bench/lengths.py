"""Time for each token by the length of its text, compared with the cost by which the product predicts waiting times.
The product's code runs backbones with random weights in bfloat16 on one thread. Rounds alternate between the lengths.

    python bench/lengths.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from engine import BATCH_TOKENS
from report import Report, machine, parser_of


def of_width() -> dict[str, Callable[[], Any]]:
    """Return functions that build backbones with few layers. Random weights do not change the time of a layer."""
    from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel, Qwen3Config, Qwen3Model

    small = {"vocab_size": 1000, "max_position_embeddings": 4200, "pad_token_id": 0}

    def bert(width: int) -> Callable[[], Any]:
        sizes = {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_attention_heads": 12,
            "num_hidden_layers": 2,
        }
        return lambda: BertModel(BertConfig(**sizes, **small))

    modern = {"num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    qwen = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
    }
    return {
        "BERT, 384": bert(384),
        "BERT, 768": bert(768),
        "ModernBERT, 768, a third with full attention": lambda: ModernBertModel(ModernBertConfig(**modern, **small)),
        "Qwen3, 1024": lambda: Qwen3Model(Qwen3Config(**qwen, head_dim=128, **small)),
    }


def lengths(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    import torch

    from sie_adapter.engine import device
    from sie_adapter.packed import attention_backend
    from sie_adapter.packed.backbone import Backbone
    from sie_contracts.models.costs import text_cost

    torch.set_num_threads(1)
    sizes = [16, 64, 128, 256, 512, 1024, 2048, 4096]
    facts = attention_backend.attention_facts(torch.device("cpu"), torch.bfloat16)
    compute = device.Compute(
        torch.device("cpu"), torch.bfloat16, *attention_backend.resolve_attention("auto", facts), facts
    )
    say(f"# Time of a token by the length of its text\n\n`python bench/lengths.py`, {machine()}, {options.rounds} ")
    say(f"rounds; medians. {BATCH_TOKENS} tokens a batch, one thread, bfloat16. Cells: processor time of a token, ")
    say("then its predicted cost, each relative to a text of 16 tokens.\n")
    say(f"| backbone, width | {' | '.join(map(str, sizes))} |")
    say("|---" * (len(sizes) + 1) + "|")
    for name, factory in of_width().items():
        times_s = dict[int, list[float]]()
        with torch.inference_mode():
            backbone = Backbone(factory().to(torch.bfloat16).eval(), compute, sizes[-1])
            for _ in range(options.rounds + 1):
                for size in sizes:
                    batch = backbone.sample((size,) * (BATCH_TOKENS // size))
                    begun_s = time.thread_time()
                    backbone.forward(batch)
                    times_s.setdefault(size, []).append(time.thread_time() - begun_s)
        took_s = {size: statistics.median(times[1:]) for size, times in times_s.items()}
        cost = {size: text_cost(size, size**2, backbone.crossover_tokens) / size for size in sizes}
        ratios = [f"{took_s[size] / took_s[16]:.2f}, {cost[size] / cost[16]:.2f}" for size in sizes]
        say(f"| {name} | {' | '.join(ratios)} |")


def main() -> None:
    options = parser_of(__doc__, rounds=5).parse_args()
    say = Report()
    lengths(options, say)
    say.save(options.out)


if __name__ == "__main__":
    main()
