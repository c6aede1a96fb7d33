"""YAML that people write: every file or argument is a value or one kind of error."""

from __future__ import annotations

import pytest
import yaml

from sie_contracts import yaml_text
from sie_contracts.yaml_text import NotYAML, load, load_with_node


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "x: !!bool q",
        "x: !!timestamp a",
        "x: !!int abc",
        "x: !!python/name:os.system",
        "x: 2024-13-45",
        "x: " + "9" * 5000,
        "x: 0x" + "f" * 5000,
        "0x" + "f" * 500 + ": x",
        "[" * 100 + "]" * 100,
        "[" * 2000 + "]" * 2000,
        "[" * 200_000,
        "- " * 100 + "x",
        "a: &a [*a]",
        "a: 1\na: 2",
        "a: 1\n---\nb: 2",
    ],
)
@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
def test_a_text_that_is_not_accepted_is_one_kind_of_error(
    text: str, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml_text, "_LOADER", getattr(yaml, loader))
    with pytest.raises(NotYAML):
        load(text)


def test_a_document_has_its_value_and_its_lines() -> None:
    value, node = load_with_node(b"a: [1, x]\nb: 2024-01-02 03:04:05\n")
    assert value["a"] == [1, "x"]
    assert node is not None
    assert [key.start_mark.line for key, _ in node.value] == [0, 1]
    assert load("") is None
