"""`sie try` at a gateway that decodes tokens."""

from __future__ import annotations

import re

import shared
from click.testing import CliRunner
from cluster import Cluster

from sie_cli.main import main

pytestmark = shared.OPEN


def test_sparse_ids_have_their_words(open_cluster: Cluster) -> None:
    shown = CliRunner().invoke(main, ["try", "test/m3", "hello world", "--url", open_cluster.url])
    assert shown.exit_code == 0, shown.output
    table = shown.output.partition("sparse: weights of 72 words")[2].partition("\n\n")[0]
    assert re.search(r"^WORD +WEIGHT\b", table, re.MULTILINE)
    assert re.search(r"^\D +\d+\.\d+  █{24} *$", table, re.MULTILINE), "the tokenizer has letters"
