"""Each extra of the distribution names every package that its modules import, and no unused package."""

from __future__ import annotations

import distribution
import pages
import pytest
from dockerfiles import ROOT

pytestmark = pytest.mark.xdist_group("sources")  # one process reads them


def test_it_is_said_what_each_extra_is_for() -> None:
    """An extra of an image combines other extras and needs no text."""
    of_users = distribution.EXTRAS.keys() - distribution.OF_DEVELOPERS - distribution.COMPILED
    assert distribution.FOR.keys() == {extra for extra in of_users if not extra.startswith("image-")}


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


def _large() -> set[str]:
    (line,) = (line for line in (ROOT / "Makefile").read_text("utf-8").splitlines() if line.startswith("LARGE :="))
    return set(line.partition(":=")[2].split())


@pages.WHOLE
def test_what_is_installed_beside_serve_is_of_the_tests() -> None:
    assert _large() <= distribution.installed_with("dev")


def test_what_is_installed_beside_serve_is_nothing_that_serve_installs() -> None:
    """Two concurrent pip processes that write the same files break each other's installation."""
    assert _large() & distribution.installed_with("serve") == set()
