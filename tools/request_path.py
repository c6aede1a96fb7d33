"""Count the files and functions of SIE that run, in each process, for one encode request. Real requests are traced.

    python tools/request_path.py              the numbers of files and functions by process, and in total
    python tools/request_path.py --list       also their names
    python tools/request_path.py --functions  also the functions in each file that are entered

A broker, a gateway, a sidecar and an adapter run with the model MODEL. Each Python process records the
functions that its threads enter between the messages `begin` and `end`. Between these messages, periodic work of a
process (heartbeats, refreshes) is stopped: a timer of an event loop that was set before `begin` ends only after `end`.
A file or a function counts only if every request enters it. Comprehensions and generator expressions are parts of the
function that has them.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cluster import until
from measure import PACKAGES
from stack import Plan, Stack
from zygote import RUN_FIRST

ROOT = Path(__file__).resolve().parents[1]
MAX_FUNCTIONS = 380
MAX_FILES = 49  # on torch; OpenVINO enters two files of the core less, and one of an extra, which does not count
# number of traced requests; a function that every one of them enters belongs to the path of a request
REQUESTS = 40
MODEL = "sentence-transformers/all-MiniLM-L6-v2"

# code that each process of SIE runs at its start, as `sitecustomize`; a forked process runs `begin` again
TRACER = """
    import asyncio, json, os, socket, sys, threading
    import uvloop

    folder = os.environ["REQUEST_PATH_FOLDER"]
    active, functions = False, set()
    number, held = 0, []  # number of the traced request; timers whose end waits for the end of its trace

    class Timer:
        _source_traceback = None

        def __init__(self, loop, callback, arguments, context):
            self.loop, self.callback, self.arguments, self.context = loop, callback, arguments, context
            self.number, self.is_cancelled, self.inner = number, False, None

        def end(self):
            if self.is_cancelled:
                return
            if active and self.number != number:
                held.append(self)
            elif self.context is None:
                self.callback(*self.arguments)
            else:
                self.context.run(self.callback, *self.arguments)

        def cancel(self):
            self.is_cancelled = True
            self.inner.cancel()

        def cancelled(self):
            return self.is_cancelled

        def when(self):
            return self.inner.when()

    def hold_timers(kind, name):
        plain = getattr(kind, name)

        def set_timer(self, when_s, callback, *arguments, context=None):
            timer = Timer(self, callback, arguments, context)
            timer.inner = plain(self, when_s, timer.end)
            return timer

        setattr(kind, name, set_timer)

    hold_timers(asyncio.BaseEventLoop, "call_at")
    hold_timers(uvloop.Loop, "call_later")

    def entered(frame, event, argument):
        if active and event == "call":
            functions.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    def serve(listener):
        global active, number
        while True:
            connection, _ = listener.accept()
            with connection:
                word = connection.recv(16)
                active = word == b"begin"
                if active:
                    functions.clear()
                    number += 1
                waiting, held[:] = held[:], ()
                for timer in waiting:
                    if not timer.loop.is_closed():
                        timer.loop.call_soon_threadsafe(timer.end)
                connection.sendall(b"[]" if active else json.dumps(sorted(functions)).encode())

    def begin():
        listener = socket.socket(socket.AF_UNIX)
        command = [word for word in sys.orig_argv if word in ("gateway", "sidecar", "adapter")]
        listener.bind(os.path.join(folder, f"{command[0] if command else 'other'}.{os.getpid()}"))
        listener.listen()
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        sys.setprofile(entered)
        threading.setprofile(entered)

    begin()
    os.register_at_fork(after_in_child=begin)
"""
START_S = 150.0  # time limit in seconds for the start of SIE: recording functions makes imports several times slower
ROLES = ("gateway", "sidecar", "adapter")
# pairs (file relative to the root of the repository, qualified name of a function in this file)
Functions = set[tuple[str, str]]
_PARTS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


def notify(address: Path, word: str) -> list[tuple[str, str]]:
    """Send `word`, "begin" or "end", to a process that records its functions. For "end", return the (file, function)
    pairs recorded since "begin". Return an empty list for "begin", and if the process has ended.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(address))
        except ConnectionRefusedError:
            return []
        connection.sendall(word.encode())
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    return [(file, name) for file, name in json.loads(reply)]


def of_product(functions: Iterable[tuple[str, str]]) -> Functions:
    return {
        (str(Path(file).relative_to(ROOT)), name)
        for file, name in functions
        if any(Path(file).is_relative_to(ROOT / package) for package in PACKAGES)
    }


def encode(url: str) -> httpx.Response:
    body = {"items": ["What is deep learning?"]}
    return httpx.post(f"{url}/v1/encode/{MODEL}", json=body, timeout=120, trust_env=False)


def trace_request(folder: Path, url: str) -> dict[str, Functions]:
    """Return, for each process, the functions of the product that one request enters."""
    for address in folder.iterdir():
        notify(address, "begin")
    reply = encode(url)
    if reply.status_code != 200:
        raise SystemExit(f"the request failed: {reply.status_code} {reply.text[:300]}")
    entered: dict[str, Functions] = defaultdict(set)
    for address in folder.iterdir():
        entered[address.name.partition(".")[0]] |= of_product(notify(address, "end"))
    return entered


def functions_of_encode() -> dict[str, Mapping[str, list[str]]]:
    """Return, for each process and file, the functions that every one of REQUESTS requests enters."""
    with tempfile.TemporaryDirectory() as name:
        folder, code = Path(name, "s"), Path(name, "code")
        folder.mkdir()
        code.mkdir()
        tracer = code / "sitecustomize.py"
        tracer.write_text(textwrap.dedent(TRACER))
        paths = os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])])
        traced = {RUN_FIRST: str(tracer)} if "PYTEST_VERSION" in os.environ else {"PYTHONPATH": paths}
        plan = Plan(
            models=(),
            workers=(None,),
            environ={**traced, "REQUEST_PATH_FOLDER": str(folder)},
            preload=False,
            start_s=START_S,
        )
        with Stack(Path(name, "stack"), plan) as stack:
            # while functions are recorded, the load may take longer than the time limit of a request
            until(lambda: encode(stack.urls[0]).status_code == 200, START_S, "the model is loaded")
            rounds = [trace_request(folder, stack.urls[0]) for _ in range(REQUESTS)]
    by_role: dict[str, Mapping[str, list[str]]] = {}
    for role in ROLES:
        files = defaultdict(list)
        for file in sorted(set.intersection(*({file for file, _ in record[role]} for record in rounds))):
            own = ({function for path, function in record[role] if path == file} for record in rounds)
            files[file] = sorted(set.intersection(*own))
        by_role[role] = files
    return by_role


def count_functions(files: Mapping[str, list[str]]) -> int:
    return sum(not name.endswith(_PARTS) for functions in files.values() for name in functions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files")
    parser.add_argument("--functions", action="store_true", help="name the files and their functions")
    options = parser.parse_args()
    by_role = functions_of_encode()
    for role, files in by_role.items():
        print(f"{role:<8} {len(files):>4} files {count_functions(files):>4} functions")
        for file, functions in files.items():
            if options.list or options.functions:
                print(f"    {file}")
            if options.functions:
                print(textwrap.fill(", ".join(functions), 120, initial_indent=" " * 8, subsequent_indent=" " * 8))
    total, entered = len(set[str]().union(*by_role.values())), sum(map(count_functions, by_role.values()))
    print(f"all      {total:>4} files {entered:>4} functions (bounds of the core: {MAX_FILES} and {MAX_FUNCTIONS})")


if __name__ == "__main__":
    main()
