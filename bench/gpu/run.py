"""Check and measure this tree on the GPU of this machine, offline, with the Python that runs this script (`make gpu`).

    print missing packages ──► run the parts in turn, each in its own process ──► FOLDER/PART.md, FOLDER/PART.log

    python3 bench/gpu/run.py [--parts tests,parity] [--results FOLDER] [--limit 480,load=60] [--within S] [--rehearse]

Exit status: 0; 1 if a part failed, exceeded its limit, or lacked a package (the other parts still run); 3 without a
GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NO_GPU = 3
LIMIT_S = 480.0
PRODUCT = ("core/contracts", "core/broker", "core/runtime", "core/store", "gateway", "sidecar", "adapter")
PRODUCT = (
    *PRODUCT,
    "config_service",
    "sdk",
    "cli",
    *(f"extras/{place.name}" for place in sorted(ROOT.glob("extras/*"))),
    "tests",
    *(f"extras/{place.name}/tests" for place in sorted(ROOT.glob("extras/*"))),
    "tools",
)
# part -> its script and the argument of the script
PARTS: dict[str, tuple[str, ...]] = {
    "tests": ("suites.py", "tests"),
    "parity": ("suites.py", "parity"),
    "device": ("device.py",),
    "memory": ("memory.py",),
    "small": ("small.py",),
    "serve": ("serve.py",),
    "load": ("load.py",),
}
_TESTS = ("tests", "parity", "memory")
# module -> parts that need the module; an empty tuple means all parts
NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "obstore", "psutil"), ()
    ),
    **dict.fromkeys(("yaml", "httpx", "huggingface_hub", "packaging"), ()),
    **dict.fromkeys(("pytest", "hypothesis", "scipy", "PIL"), _TESTS),
    "sentence_transformers": ("device", "parity"),
    **dict.fromkeys(("peft", "timm", "gliner", "gliner2", "gliclass", "soundfile", "soxr"), ("parity",)),
    **dict.fromkeys(("fastapi", "uvicorn", "httptools", "orjson", "nats", "uvloop", "click", "rich"), ("serve",)),
    **dict.fromkeys(
        ("nanoarrow", "python_multipart", "prometheus_client", "websockets", "fastapi_offline"), ("serve",)
    ),
}
# optional module -> effect if the module is missing
USES = {
    "pynvml": "no utilisation; the memory of other processes is not seen",
    "flash_attn": "attention is SDPA alone",
    "xdist": "tests run in one process, several times as long",
    "pytest_timeout": "a test that hangs ends its part",
    "triton": "no compiled layers",
}
# If one of these modules is missing, the parts that need it still run. Only the tests that import the module fail.
_PARTLY = {"gliner", "gliner2", "gliclass", "soundfile", "soxr", "timm", "peft"}


def lacks(parts: Sequence[str]) -> dict[str, str]:
    """Print the modules that are missing or have another version than SIE requires. Return the parts that cannot run,
    each with the module that it lacks.
    """
    stopped: dict[str, str] = {}
    for module, needed in NEEDS.items():
        if importlib.util.find_spec(module) is not None:
            continue
        cost = [part for part in needed or PARTS if part in parts]
        if not cost:
            continue
        is_partly = module in _PARTLY
        print(f"missing: {module}: {'tests that import it fail in' if is_partly else 'not run:'} {', '.join(cost)}")
        if not is_partly:
            stopped |= dict.fromkeys(cost, module)
    for module, cost in USES.items():
        if importlib.util.find_spec(module) is None:
            print(f"missing: {module}: {cost}")
    pinned = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8")))
    pinned["torch"] = re.search(r'"torch==([\w.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))[1]  # type: ignore[index]
    for package in ("torch", "transformers", "sentence-transformers", "tokenizers", "msgspec"):
        try:
            present = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if present.partition("+")[0] != pinned.get(package, present):
            print(f"other version: {package} {present}, SIE names {pinned[package]}")
    return stopped


def gpu() -> str:
    """Return the GPU's name; empty if torch can use none. A child process asks torch, because CUDA must not be
    initialised in this process.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return ""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return ended.stdout.strip()


def environment(results: Path, *, rehearse: bool, site: Path) -> dict[str, str]:
    """Return the environment variables of the parts: this tree is on PYTHONPATH, the programs of its packages are on
    PATH, and the Hugging Face Hub is not used.
    """
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [str(HERE), *(str(ROOT / part) for part in PRODUCT), str(site), *own]
    programs = [str(Path(sys.executable).parent), *(f"{path}/bin" for path in own), os.environ.get("PATH", "")]
    more = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join(programs),
        "GPU_RESULTS": str(results),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }
    return {**os.environ, **more, **({"GPU_REHEARSE": "1"} if rehearse else {})}


def describe_package(site: Path) -> None:
    """Write the metadata of an installed SIE to `site`. The processes of the parts read the version from there, because
    SIE is not installed here.
    """
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    folder = site / f"sie_cluster-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sie-cluster\nVersion: {version}\n")


def run(part: str, results: Path, environ: Mapping[str, str], limit_s: float) -> bool:
    """Run a part until its end or its time limit. Print its table rows, and write all its output to PART.log."""
    script, *arguments = PARTS[part]
    print(f"== {part}, at most {limit_s:.0f} s", flush=True)
    begun_s = time.monotonic()
    with (results / f"{part}.log").open("w+b", buffering=0) as log:
        command = [sys.executable, str(HERE / script), *arguments]
        child = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        shown = 0
        try:
            while child.poll() is None and time.monotonic() - begun_s < limit_s:
                time.sleep(0.1)
                shown = _show(log.name, shown)
        finally:
            is_cut = child.poll() is None
            if is_cut:
                os.killpg(child.pid, signal.SIGKILL)
            status = child.wait()
        _show(log.name, shown)
    ended = "cut off" if is_cut else f"ended with {status}, see {part}.log" if status else "passed"
    print(f"== {part}: {ended}, {time.monotonic() - begun_s:.0f} s", flush=True)
    return not status


def _show(log: str, shown: int) -> int:
    """Print the table rows of the log from byte `shown` on. Return the byte up to which the log is printed."""
    with open(log, "rb") as file:
        file.seek(shown)
        read = file.read()
    whole = read[: read.rfind(b"\n") + 1]
    for line in whole.decode("utf-8", "replace").splitlines():
        if line.startswith("|"):
            print(line, flush=True)
    return shown + len(whole)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"parts to run, of {', '.join(PARTS)}")
    parser.add_argument("--results", type=Path, help="folder in which the tables are written [bench/results/gpu-CARD]")
    parser.add_argument(
        "--limit",
        default="",
        help="seconds after which a part is cut off, or PART=SECONDS for one part, joined by commas [480]",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=math.inf,
        help="seconds for all parts together; then the part in progress is cut off",
    )
    parser.add_argument("--rehearse", action="store_true", help="use tiny models on a CPU, to test this script itself")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}")
    limits = dict.fromkeys(PARTS, LIMIT_S)
    for item in filter(None, options.limit.split(",")):
        part, _, seconds = item.rpartition("=")
        limits |= dict.fromkeys([part] if part else PARTS, float(seconds))
    end_s = time.monotonic() + options.within
    card = "rehearsal" if options.rehearse else gpu()
    if not card:
        print("no GPU that torch can use is here: nothing was run (make gpu REHEARSE=1 tries the kit on a processor)")
        return NO_GPU
    results = (options.results or ROOT / "bench" / "results" / f"gpu-{card.lower().replace(' ', '-')}").resolve()
    results.mkdir(parents=True, exist_ok=True)
    print(f"{card}, results in {results}", flush=True)
    stopped = lacks(parts)
    with tempfile.TemporaryDirectory() as site:
        describe_package(Path(site))
        environ = environment(results, rehearse=options.rehearse, site=Path(site))
        passed = [
            part not in stopped and run(part, results, environ, min(limits[part], end_s - time.monotonic()))
            for part in parts
        ]
    for part, has_passed in zip(parts, passed, strict=True):
        lacking = f"not run, {stopped[part]} is missing" if part in stopped else "failed"
        print(f"{part}: {'passed' if has_passed else lacking}")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
