"""Each extra of the distribution names every package that its modules import, and no unused package."""

from __future__ import annotations

import distribution
import pytest

pytestmark = pytest.mark.xdist_group("sources")  # one process reads them


@pytest.mark.parametrize("extra", distribution.FOR)
def test_an_extra_names_all_that_its_modules_import(extra: str) -> None:
    """tests/system/test_release.py installs each extra and imports its modules."""
    packages = {*distribution.named(extra), *distribution.named("flash")}
    places = distribution.used(extra).items()
    missing = {
        owner: where for owner, where in places if not {owner, distribution.FROM_ELSEWHERE.get(owner)} & packages
    }
    assert missing == {}


@pytest.mark.parametrize("extra", distribution.FOR)
def test_an_extra_names_nothing_that_nobody_uses(extra: str) -> None:
    assert distribution.own(extra) - distribution.used(extra).keys() - distribution.USED_BY_OTHERS.keys() == set()
