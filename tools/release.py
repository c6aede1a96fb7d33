"""Build all files of a release in one folder. `make release` runs this script.

    checkout ──► source archive ──► wheel
        ├──────► wheel                         the import package sie_sdk, another name of the client
        ├──────► chart                         helm package
        ├──────► images.txt                    names and ids of the images, if a builder is installed
        ├──────► bill of materials             CycloneDX, of an environment with the wheel and its extra `serve`
        └──────► SHA256SUMS                    of all these files

Images stay in the store of their builder; push them from this store. The script ends with a list of the parts that were
not built. It refuses a checkout with uncommitted changes, because nobody else could build the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import installation
import version

ROOT = Path(__file__).resolve().parents[1]
BUILDERS = ("docker", "podman", "buildah")
IMAGES = ("gateway", "config", "sidecar", "adapter-cpu")
SUMS = "SHA256SUMS"
BILL_COMMAND = "cyclonedx-bom==7.5.0"  # as in docker/Dockerfile


class ReleaseError(Exception):
    """Error for a release that cannot be built. The message says what to change."""


def run(*command: str | Path, **environ: str) -> str:
    """Return the output of a command; the terminal shows its errors. Raise ReleaseError if the command fails."""
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))} ended with status {done.returncode}\n{done.stdout}")
    return done.stdout


def checked_version(*, dirty: bool) -> str:
    """Return the version. Raise ReleaseError if a copy of the version in another file differs from it, or if files have
    uncommitted changes and `dirty` is False.
    """
    release_version = version.current()
    if wrong := [
        f"{place} has {copy_version}" for place, copy_version in version.found() if copy_version != release_version
    ]:
        raise ReleaseError(
            f"the version is {release_version}, but {', '.join(wrong)}: run python tools/version.py {release_version}"
        )
    changed = run("git", "status", "--porcelain").splitlines()
    if changed and not dirty:
        raise ReleaseError(f"{len(changed)} files have uncommitted changes: commit them, or use --dirty for a trial")
    return release_version


def distributions(out: Path) -> None:
    """Build the source archive, the wheel, and the alias package's wheel. The first wheel is built from the archive, to
    prove that no file is missing in the archive.
    """
    at = run("git", "log", "-1", "--format=%ct").strip()
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out)
    run(*build, ROOT, SOURCE_DATE_EPOCH=at)
    run(*build, "--wheel", ROOT / "sdk" / "alias", SOURCE_DATE_EPOCH=at)


def chart(out: Path) -> None:
    run(Path(sys.executable).with_name("helm"), "package", ROOT / "charts" / "sie-cluster", "--destination", out)


def bill(out: Path, of: str) -> None:
    """Write the bill of materials of an environment that has only the wheel with the extra `serve`. The command that
    writes it has an environment of its own, so that it is not in the bill. Raise ReleaseError, and StepFailed if pip
    fails.
    """
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    with tempfile.TemporaryDirectory() as folder:
        served, command = Path(folder) / "served", Path(folder) / "command"
        run(sys.executable, "-m", "venv", "--without-pip", served)
        run(sys.executable, "-m", "venv", command)
        installer = installation.Installer(served, os.environ)
        installer.pip = (str(command / "bin/python"), "-m", "pip", "--python", str(served / "bin/python"))
        installer.install_torch(installation.torch_version(ROOT))
        installer.run("the wheel and its libraries", *constraints, f"{out}/sie_cluster-{of}-py3-none-any.whl[serve]")
        run(command / "bin/pip", "install", "--quiet", *constraints, BILL_COMMAND)
        bill_file = out / f"sie-cluster-{of}.cdx.json"
        write = ("environment", "--pyproject", ROOT / "pyproject.toml", "--output-reproducible")
        run(command / "bin/cyclonedx-py", *write, "--output-file", bill_file, served / "bin/python")


def images(out: Path, of: str) -> list[str]:
    """Build the images by `make image-NAME` if a builder is installed. Return the images not built, with the reason."""
    cuda = "image adapter-cuda: `make image-adapter-cuda` builds it; this needs NVIDIA's image with the CUDA compiler"
    if not os.environ.get("BUILDER") and not any(map(shutil.which, BUILDERS)):
        return [f"images {', '.join(IMAGES)}: none of {', '.join(BUILDERS)} is installed", cuda]
    registry = os.environ.get("REGISTRY", "").rstrip("/")
    lines = []
    for name in IMAGES:
        ident = out / f"{name}.id"
        run("make", f"image-{name}", f"ARGS=--iidfile {ident}")
        lines.append(f"{registry and registry + '/'}sie-{name}:{of} {ident.read_text().strip()}\n")
        ident.unlink()
    (out / "images.txt").write_text("".join(lines))
    return [cuda]


def sums(out: Path) -> None:
    """Write the SHA-256 digest of each file to SHA256SUMS, in the format of `sha256sum --check`."""
    files = sorted(path for path in out.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / SUMS).write_text("".join(lines))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Build a release.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="an empty or new folder")
    parser.add_argument("--without-images", action="store_true")
    parser.add_argument("--dirty", action="store_true", help="allow uncommitted changes, for a trial")
    options = parser.parse_args(arguments)
    out: Path = options.out.resolve()
    try:
        if out.exists() and any(out.iterdir()):
            raise ReleaseError(f"{out} is not empty: remove it, or name another folder by --out")
        out.mkdir(parents=True, exist_ok=True)
        release_version = checked_version(dirty=options.dirty)
        distributions(out)
        chart(out)
        bill(out, release_version)
        left_out = ["images: --without-images"] if options.without_images else images(out, release_version)
        sums(out)
        tagged = f"v{release_version}" in run("git", "tag", "--points-at", "HEAD").split()
    except (ReleaseError, installation.StepFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print((out / SUMS).read_text(), end="")
    print(*(f"left out: {reason}" for reason in left_out), sep="\n")
    if not tagged:
        print(f"not tagged: git tag v{release_version} makes this commit the release")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
