"""Rules of the engines that packages bring."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sie_adapter.engine import engines
from sie_adapter.engine.engines import EngineFacts, Rule
from sie_contracts import entry_points
from sie_contracts.errors import ModelLoadFailed

TEXTS = EngineFacts("cpu", reads_text=True)
THEIRS = {"theirs": Rule("it is theirs", "", lambda facts: facts.lora and "it runs no LoRA")}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Mapping[str, Rule]:
    """Return the rules of an installation whose packages bring these engines."""
    of_group = {engines.ENGINE_POINTS: entry_points.PackageObjects(objects=request.param)}
    monkeypatch.setattr(entry_points, "load", lambda group: of_group.get(group, entry_points.PackageObjects()))
    rules: Mapping[str, Rule] = engines.rules.__wrapped__()  # type: ignore[attr-defined]
    monkeypatch.setattr(engines, "rules", lambda: rules)
    return rules


@pytest.mark.parametrize("installed", [{}, THEIRS], indirect=True)
def test_rules_has_torch_last(installed: Mapping[str, Rule]) -> None:
    assert list(installed)[-1] == "torch"


@pytest.mark.parametrize(("installed", "engine"), [({}, "torch"), (THEIRS, "theirs")], indirect=["installed"])
@pytest.mark.usefixtures("installed")
def test_choose_returns_the_engine_of_a_package_if_there_is_one(engine: str) -> None:
    assert engines.choose(None, TEXTS).engine == engine


@pytest.mark.parametrize("installed", [{}], indirect=True)
@pytest.mark.usefixtures("installed")
def test_choose_refuses_an_engine_that_no_package_brings() -> None:
    with pytest.raises(ModelLoadFailed, match=r"load\.engine is openvino: no installed package") as refused:
        engines.choose("openvino", TEXTS)
    assert refused.value.extras["error_class"] == "INCOMPATIBLE"
