"""Shared fixtures."""

import gc
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import public_certificates  # noqa: F401
import pytest
from _pytest.logging import catching_logs
from hypothesis import settings

# examples have no deadline, because their duration depends on other load of the machine
settings.register_profile("usual", deadline=None, max_examples=40)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile("usual")


def _attach(self: catching_logs[Any]) -> Any:
    """Replace `__enter__`, which takes 4 ms of each test: six times a test it searches the 600 loggers of torch and
    transformers for some that do not propagate.
    """
    root = logging.getLogger()
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(self.orig_level, self.level))
    return self.handler


catching_logs.__enter__ = _attach  # type: ignore[method-assign]


# helper modules of the extras' tests, which import each other by name as those of tests/ do
sys.path += [str(folder) for folder in sorted(Path(__file__).parent.glob("extras/*/tests"))]


def pytest_configure(config: pytest.Config) -> None:
    """Isolate the environment and start the zygote before pytest-xdist starts processes."""
    import zygote

    _isolate(config)
    zygote.share()
    if config.option.verbose > 0 and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_AtOnce(config))


def _isolate(config: pytest.Config) -> None:
    """Hide from tests the settings of the user's shell, the user's cache of weights, and a cluster that runs with the
    user's data directory.
    """
    for name in [name for name in os.environ if name.startswith(("SIE_", "OTEL_"))]:
        del os.environ[name]
    if not hasattr(config, "workerinput"):
        import zygote

        data = zygote.folder_of_this_process("sie-tests")
        config.add_cleanup(lambda: shutil.rmtree(data))
        os.environ["XDG_DATA_HOME"] = data
        os.environ["HF_HOME"] = os.path.join(data, "cache")


class _AtOnce:
    """With -v, print a failure when it happens and not only at the end, because a run of an hour may be cut off."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)  # after the line of the test
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.get_terminal_writer()
            terminal.line()
            terminal.line(f"{report.when} of {report.nodeid}:")
            terminal.line(report.longreprtext)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests by group. One process runs all tests of a file, so a cluster that they share is started once. The
    mark `xdist_group` makes other groups: several files that share something, or parts of a file that share nothing.
    Tests of a group run one after another, even with one process.
    """
    from groups import group

    places: dict[str, int] = {}
    for item in items:
        places.setdefault(group(item), len(places))
    items.sort(key=lambda item: places[group(item)])
    if getattr(config.option, "loadgroup", False):
        # pytest-xdist 3.8 writes the group to a field that pytest 9.2 lacks, and would distribute tests one by one
        for item in items:
            item._id = type(item._id).parse(f"{item.nodeid}@{group(item)}")


def pytest_collection_finish() -> None:
    """Freeze the imported objects, as the processes do: collecting them took most of the time of an eviction."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def released_ports() -> Iterator[None]:
    """Release the ports that the tests of a file have reserved. Each is an open socket, of which a process that runs
    many files would have more than 1,024. Until then, a process of the file may start again at its port.
    """
    from sie_cli.serve import ports

    descriptors = ports._descriptors
    before = set(descriptors)
    yield
    for port in descriptors.keys() - before:
        os.close(descriptors.pop(port))


@pytest.fixture
def quick_collections() -> None:
    """Freeze the objects that earlier tests left, for tests in which each of many evictions collects garbage."""
    gc.collect()
    gc.freeze()
