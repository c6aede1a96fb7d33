"""The processes that decode images and sounds: a crash costs one file, and no process outlives the sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import sound_files
from image_files import bomb, encoded, picture, png
from inprocess import settings_of, until

from sie_contracts.errors import (
    InternalFailure,
    InvalidInput,
    QueueFull,
    ResourceExhausted,
    ShuttingDown,
    SIEError,
)
from sie_contracts.media.images import Recipe
from sie_contracts.media.sounds import SoundRecipe
from sie_sidecar.prepare import images, media_pool, sounds
from sie_sidecar.prepare.media_frames import PreparedImage, SoundFeatures
from sie_sidecar.prepare.media_pool import MediaPool

SMALL = Recipe("crop", height=16, width=16, shorter=16)
GOOD = encoded(picture())
LARGE = png(9000, 9000, colour=2, bits=8, body=GOOD)  # the decoder takes 324 MB before it sees the damage


@contextlib.asynccontextmanager
async def pool_of(workers: int = 1, *arguments: Any, **options: Any) -> AsyncIterator[MediaPool]:
    pool = MediaPool(workers, *arguments, **options)
    try:
        yield pool
    finally:
        await pool.close()
        assert pool.pids == ()


async def refusal(pool: MediaPool, data: bytes) -> str:
    with pytest.raises(InvalidInput) as caught:
        await pool.prepare(data, SMALL)
    assert caught.value.reason == "invalid_media"
    return caught.value.message


async def frozen(pool: MediaPool) -> int:
    """Stop the only worker with SIGSTOP, so that it keeps the next file that it gets, and return its process id."""
    await pool.prepare(GOOD, SMALL)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    return pid


async def test_an_image_becomes_the_pixels_that_the_function_makes() -> None:
    async with pool_of() as pool:
        for data in (GOOD, encoded(picture(300, 200), "JPEG")):
            expected, prepared = images.prepare(data, SMALL), await pool.prepare(data, SMALL)
            assert (prepared.pixels, prepared.digest, prepared.upright) == (
                expected.pixels,
                expected.digest(),
                expected.upright,
            )
            assert (prepared.height, prepared.width, prepared.animated) == (16, 16, False)


async def test_a_sound_becomes_the_features_that_the_function_makes_beside_images() -> None:
    """The same processes prepare sounds and images."""
    counted: list[tuple[str, str]] = []
    recipe = SoundRecipe(8000, 8000, 400, 160, 20, 500, high=4000.0)
    sound = sound_files.encoded(sound_files.tone(0.4), "FLAC")
    async with pool_of(2, lambda noun, result: counted.append((noun, result))) as pool:
        files = [pool.prepare(sound, recipe), pool.prepare(GOOD, SMALL), pool.prepare(GOOD, recipe)]
        prepared_sound, prepared_image, wrong = await asyncio.gather(*files, return_exceptions=True)
        assert len(pool.pids) <= 2
    expected = sounds.prepare(sound, recipe)
    assert isinstance(prepared_sound, SoundFeatures)
    features = SoundFeatures(prepared_sound.number, *recipe.shape, 0.4, expected.digest(), expected.values.tobytes())
    assert prepared_sound == features
    assert isinstance(prepared_image, PreparedImage)
    assert isinstance(wrong, InvalidInput)
    assert wrong.message.startswith("undecodable: the first bytes are of no supported sound format")
    assert Counter(counted) == {("sound", "prepared"): 1, ("image", "prepared"): 1, ("sound", "undecodable"): 1}


@pytest.mark.parametrize(("variable", "workers"), [({}, 4), ({"SIE_IMAGE_WORKERS": "2"}, 2)])
async def test_as_many_images_are_prepared_at_once_as_there_are_image_workers(
    variable: dict[str, str], workers: int
) -> None:
    """Each of the SIE_IMAGE_WORKERS processes holds one image while it is frozen, and the other images wait."""
    async with pool_of(settings_of(**variable).image_workers) as pool:
        await asyncio.gather(*(pool.prepare(GOOD, SMALL) for _ in range(4 * workers)))
        assert len(pool.pids) == workers
        for pid in pool.pids:
            os.kill(pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(pool.prepare(GOOD, SMALL)) for _ in range(workers + 3)]
        await until(lambda: pool.waiting == 3, "the others wait")
        for pid in pool.pids:
            os.kill(pid, signal.SIGCONT)
        assert len({image.digest for image in await asyncio.gather(*waiting)}) == 1
        assert len(pool.pids) == workers


async def test_an_unusable_file_says_why_and_its_neighbours_are_prepared() -> None:
    counted: list[str] = []
    async with pool_of(2, lambda noun, result: counted.append(result)) as pool:
        outcomes = await asyncio.gather(
            *(pool.prepare(data, SMALL) for data in (GOOD, b"", GOOD, bomb(), GOOD[:200], GOOD)), return_exceptions=True
        )
        assert Counter(counted) == {"prepared": 3, "undecodable": 2, "too_large": 1}
        causes = [outcome.message.partition(":")[0] if isinstance(outcome, SIEError) else "" for outcome in outcomes]
        assert causes == ["", "undecodable", "", "too_large", "undecodable", ""]


async def test_a_decoder_that_crashes_costs_one_image() -> None:
    """The worker that holds an image dies of SIGSEGV. That image fails, and the images that wait do not."""
    async with pool_of() as pool:
        pid = await frozen(pool)
        first, *waiting_tasks = (asyncio.create_task(pool.prepare(GOOD, SMALL)) for _ in range(4))
        await until(lambda: pool.waiting == 3, "the others wait")
        os.kill(pid, signal.SIGSEGV)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(InvalidInput, match="undecodable: the decoder of the image crashed"):
            await first
        assert {image.height for image in await asyncio.gather(*waiting_tasks)} == {16}
        (new_pid,) = pool.pids
        assert new_pid != pid


async def test_a_worker_that_the_kernel_kills_does_not_make_the_file_a_bad_one() -> None:
    async with pool_of() as pool:
        pid = await frozen(pool)
        first, second = (asyncio.create_task(pool.prepare(GOOD, SMALL)) for _ in range(2))
        await until(lambda: pool.waiting == 1, "the worker has the first image, and the second waits")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ResourceExhausted):
            await first
        assert (await second).height == 16


async def test_an_image_that_takes_too_long_is_given_up_and_its_worker_replaced() -> None:
    async with pool_of(deadline_s=1.5) as pool:
        pid = await frozen(pool)
        assert await refusal(pool, GOOD) == "timeout: decoding the image took longer than 1.5 s"
        assert (await pool.prepare(GOOD, SMALL)).height == 16
        assert pid not in pool.pids
        assert not psutil.pid_exists(pid)


def killed_first(pid: int) -> bool:
    return Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"


async def test_a_worker_has_so_much_memory_and_no_more() -> None:
    async with pool_of(memory_bytes=250 << 20) as pool:
        pid = (await pool.prepare(GOOD, SMALL), *pool.pids)[1]
        assert (await refusal(pool, LARGE)).startswith("too_large: decoding the image takes more memory")
        assert (await pool.prepare(GOOD, SMALL)).height == 16
        assert pool.pids == (pid,)
        assert psutil.Process(pid).rlimit(psutil.RLIMIT_CORE) == (0, 0)
        assert killed_first(pid)


async def test_a_caller_that_leaves_costs_no_worker_and_mixes_up_no_answers() -> None:
    """Every other caller of ten different images leaves while its image waits or is at a worker."""
    files = [encoded(picture(90, 60, seed)) for seed in range(10)]
    expected = [images.prepare(data, SMALL).digest() for data in files]
    async with pool_of(2) as pool:
        for turn in range(4):
            tasks = [asyncio.create_task(pool.prepare(data, SMALL)) for data in files]
            for _ in range(turn):
                await asyncio.sleep(0.001)
            for task in tasks[turn % 2 :: 2]:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(
                isinstance(outcome, asyncio.CancelledError) or outcome.digest == digest  # type: ignore[union-attr]
                for outcome, digest in zip(outcomes, expected, strict=True)
            )
        pids = pool.pids
        assert [
            image.digest for image in await asyncio.gather(*(pool.prepare(data, SMALL) for data in files))
        ] == expected
        assert pool.pids == pids
        assert pool.waiting == 0


async def test_more_images_than_a_request_can_wait_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_pool, "MAX_WAITING", 3)
    async with pool_of() as pool:
        pid = await frozen(pool)
        running = asyncio.create_task(pool.prepare(GOOD, SMALL))
        await asyncio.sleep(0)
        await until(lambda: pool.waiting == 0, "the worker has an image")
        waiting = [asyncio.create_task(pool.prepare(GOOD, SMALL)) for _ in range(3)]
        await until(lambda: pool.waiting == 3, "the others wait")
        with pytest.raises(QueueFull):
            await pool.prepare(GOOD, SMALL)
        os.kill(pid, signal.SIGCONT)
        await asyncio.gather(running, *waiting)


async def test_the_end_of_the_pool_ends_its_workers_and_answers_everybody() -> None:
    async with pool_of(deadline_s=60) as pool:
        pid = await frozen(pool)
        tasks = [asyncio.create_task(pool.prepare(GOOD, SMALL)) for _ in range(3)]
        await until(lambda: pool.waiting == 2, "the others wait")
        await pool.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ShuttingDown] * 3
        assert not psutil.pid_exists(pid)
        with pytest.raises(ShuttingDown):
            await pool.prepare(GOOD, SMALL)


async def test_a_worker_that_cannot_start_is_no_fault_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with pool_of() as pool:
        with pytest.raises(ResourceExhausted, match="decodes files could not be started"):
            await pool.prepare(GOOD, SMALL)
        monkeypatch.undo()
        assert (await pool.prepare(GOOD, SMALL)).height == 16


async def test_a_worker_gets_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIE_NATS_PASSWORD", "canary")
    async with pool_of() as pool:
        await pool.prepare(GOOD, SMALL)
        worker = psutil.Process(pool.pids[0])
        assert worker.environ().keys() <= {"PYTHONPATH", "LC_CTYPE", "OPENBLAS_NUM_THREADS"}
        assert {Path(open_file.path).name for open_file in worker.open_files()} <= {"null"}


LIES = {
    "another image's answer": {"number": 999},
    "too few pixels": {"pixels": bytes(5)},
    "a size that the recipe does not give": {"height": 8, "width": 32},
    "an image that is refused": {"upright_height": 1, "upright_width": 100_000},
}


@pytest.mark.parametrize("name", LIES)
async def test_what_a_worker_says_is_checked(name: str, tmp_path: Path) -> None:
    """A worker that a malicious file controls may answer anything. The pool ends it, and the image is unusable."""
    image = PreparedImage(1, 16, 16, 4, 4, False, bytes(32), bytes(768))
    message = {"type": "PreparedImage", **msgspec.structs.asdict(image)}
    answer = msgspec.msgpack.encode({**message, **LIES[name]})
    hello = msgspec.msgpack.encode({"type": "Hello", "pid": 1})
    frames = b"".join(len(frame).to_bytes(4, "big") + frame for frame in (hello, answer))
    script = tmp_path / "liar"
    script.write_text(f"#!{sys.executable}\nimport os, time\nos.write(0, {frames!r})\ntime.sleep(60)\n")
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", str(script))
        async with pool_of(deadline_s=20) as pool:
            assert await refusal(pool, GOOD) == "undecodable: the decoder of the image crashed"


OF_A_SIDECAR = """
import asyncio, sys
from image_files import encoded, picture
from sie_contracts.media.images import Recipe
from sie_sidecar.prepare.media_pool import MediaPool

async def main():
    pool = MediaPool(2)
    recipe = Recipe("squash", height=8, width=8)
    await asyncio.gather(*(pool.prepare(encoded(picture()), recipe) for _ in range(6)))
    print(*pool.pids, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere only a worker that waits ends")
@pytest.mark.parametrize("busy", [False, True])
def test_no_worker_outlives_a_sidecar_that_is_killed(busy: bool) -> None:
    """A worker that hangs in a decoder ends too, although it cannot see that its socket has no peer."""
    sidecar = subprocess.Popen([sys.executable, "-c", OF_A_SIDECAR], stdout=subprocess.PIPE, text=True, env=paths())
    with sidecar:
        assert sidecar.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in sidecar.stdout.readline().split()]
        assert len(workers) in (1, 2)
        for worker in workers if busy else ():
            worker.send_signal(signal.SIGSTOP)
        sidecar.kill()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def paths() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])}


async def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    async with pool_of() as pool:
        await pool.prepare(GOOD, SMALL)
        worker = psutil.Process(pool.pids[0])
        before, data = worker.cpu_times(), bomb()
        assert len(data) < 60_000
        assert (await refusal(pool, data)).startswith("too_large: ")
        after = worker.cpu_times()
        assert after.user + after.system - before.user - before.system < 0.1


async def test_a_worker_that_died_without_an_image_costs_none() -> None:
    async with pool_of() as pool:
        await pool.prepare(GOOD, SMALL)
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(pid), "it is gone")
        assert (await pool.prepare(GOOD, SMALL)).height == 16
        assert pool.pids not in ((), (pid,))


async def test_no_process_is_left_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*, sock: socket.socket, limit: int) -> None:
        sock.close()
        raise MemoryError

    monkeypatch.setattr(asyncio, "open_unix_connection", fail)
    before = psutil.Process().children()
    async with pool_of() as pool:
        with pytest.raises(InternalFailure):
            await pool.prepare(GOOD, SMALL)
        assert psutil.Process().children() == before
