"""Processes that fetch from a hub stub into one cache. They are forked from a process that has done the imports, and a
test can let them die at a chosen change of the disk.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from hub_stub import COMMIT, HubStub

from sie_contracts.wire.heartbeats import Fetched

REPOSITORY = "org/model"
END_S = 60.0  # far above the expected time
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["fetching", "sie_store.weights.hub", "sie_store.weights.cache", "huggingface_hub.hf_api", "huggingface_hub.utils"]
)
# functions of `os` that change the disk visibly for other processes
EFFECTS = (
    "fsync",
    "replace",
    "rename",
    "link",
    "unlink",
    "rmdir",
    "mkdir",
)


class Fetcher:
    """One process that obtains the snapshot. It sends on `news`: "waiting" if another process fetches, then its folder,
    or the class and text of its failure.
    """

    def __init__(self, hub: HubStub, cache: Path, *, dies_at: int = 0, removes: bool = False) -> None:
        self.news, theirs = _FORKS.Pipe(duplex=False)
        self.process: ForkServerProcess = _FORKS.Process(
            target=_run, args=(theirs, hub.url, cache, dies_at, removes), daemon=True
        )
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self) -> Any:
        """Return the next message of the process. Raise EOFError if it died."""
        assert self.news.poll(END_S), "the fetcher tells nothing"
        return self.news.recv()

    def end(self) -> int:
        """Wait for its end and return its status, which is negative after a signal."""
        self.process.join(END_S)
        assert self.process.exitcode is not None, "the fetcher does not end"
        return self.process.exitcode


@contextlib.contextmanager
def fetcher(hub: HubStub, cache: Path, **options: Any) -> Iterator[Fetcher]:
    hub_fetcher = Fetcher(hub, cache, **options)
    try:
        yield hub_fetcher
    finally:
        hub_fetcher.process.kill()
        hub_fetcher.end()


def obtain(hub: HubStub, cache: Path) -> Path:
    """Obtain the snapshot in this process, which already has a client of the hub, and return its folder. Raise
    FetchFailed if that fails.
    """
    from huggingface_hub import constants

    from sie_store.weights.cache import LocalCache
    from sie_store.weights.hub import hub_fetch
    from sie_store.weights.selection import common

    before, constants.ENDPOINT = constants.ENDPOINT, hub.url
    try:
        return LocalCache(cache).obtain(REPOSITORY, COMMIT, hub_fetch(REPOSITORY, COMMIT, common), "it", select=common)
    finally:
        constants.ENDPOINT = before


def _run(news: Connection, endpoint: str, cache: Path, dies_at: int, removes: bool) -> None:
    from huggingface_hub import constants

    from sie_store.weights.cache import LocalCache
    from sie_store.weights.hub import hub_fetch
    from sie_store.weights.manifest import FetchFailed
    from sie_store.weights.progress import FetchProgress
    from sie_store.weights.selection import common

    class Telling(FetchProgress):
        """A progress that sends once that another process fetches."""

        told = False

        def follow(self, fetched: Fetched) -> None:
            super().follow(fetched)
            if not self.told:
                self.told = True
                news.send("waiting")

    constants.ENDPOINT = endpoint
    local = LocalCache(cache)
    if dies_at:
        _die_at(dies_at)
    try:
        if removes:
            news.send(local.remove(REPOSITORY, COMMIT))
        else:
            news.send(
                local.obtain(
                    REPOSITORY,
                    COMMIT,
                    hub_fetch(REPOSITORY, COMMIT, common),
                    "it",
                    select=common,
                    progress=Telling("it"),
                )
            )
    except FetchFailed as error:
        news.send((error.error_class, error.message))


def _die_at(count: int) -> None:
    """Let this process die by SIGKILL before the `count`th change of the disk from now on, in any thread."""
    left = [count]

    def dying(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(os, name, call)

    for name in EFFECTS:
        dying(name)
