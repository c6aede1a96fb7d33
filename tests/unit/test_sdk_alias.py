"""The distribution that provides `sie_sdk`, with the names of `sie_client`, alone or beside another `sie_sdk`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages in which pip has installed the wheel."""
    out = tmp_path_factory.mktemp("alias")
    argv = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(ROOT / "sdk/alias")]
    subprocess.run(argv, capture_output=True, check=True, timeout=60)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def output(site: Path, code: str) -> str:
    """Return the output of code that runs with this folder and the client on its path, and no other installation of
    either.
    """
    own = "sys.path[:] = [path for path in sys.path if 'alias' not in path.rpartition('/')[2]]"
    start = f"import site, sys\n{own}\nsys.path.append({str(site)!r})\nsite.addsitedir({str(site)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", start + code],
        env={"PYTHONPATH": str(ROOT / "sdk")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_another_owner_of_the_name_comes_first(site: Path) -> None:
    """Both packages are in one folder, as pip installs them. The wheel has no file at a path of the other package."""
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {
        "sie_sdk_alias",
        "sie_sdk_alias.pth",
    }
    package = site / "sie_sdk"
    package.mkdir()
    (package / "__init__.py").write_text("OWNER = 'another'\n")
    assert output(site, "import sie_sdk; print(sie_sdk.OWNER)") == "another"
    shutil.rmtree(package)
    assert output(site, "import sie_sdk; print(sie_sdk.__name__)") == "sie_client"
