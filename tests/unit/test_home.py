"""The home folder and the name of a user who has neither."""

from __future__ import annotations

import getpass
import os
import pwd
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie_cli import home
from sie_contracts.settings import SettingError

UID = 54321
# that user may lack the permission to read the folder of the interpreter
AS_NOBODY_KNOWN = (
    "setpriv",
    f"--reuid={UID}",
    f"--regid={UID}",
    "--clear-groups",
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def _nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", missing)
    monkeypatch.setattr(os, "access", lambda path, _mode: os.fspath(path) != "/")  # as for anybody but root


@pytest.mark.usefixtures("_nameless")
@pytest.mark.parametrize("environ", [{}, {"HOME": ""}, {"HOME": "/"}, {"HOME": "/none/at/all"}, {"HOME": "home"}])
def test_a_user_without_a_home_gets_a_private_folder_and_a_name(
    environ: dict[str, str], temporary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home.settle(environ)
    folder = temporary / f"sie-{os.geteuid()}"
    assert environ == {"HOME": str(folder), "USER": f"uid-{os.geteuid()}"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert str(folder) in capsys.readouterr().err
    before = dict(environ)
    home.settle(environ)  # as a child process does
    assert (environ, capsys.readouterr().err) == (before, "")
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("USER", environ["USER"])
    assert getpass.getuser() == environ["USER"]


@pytest.mark.usefixtures("_nameless")
def test_a_home_that_is_there_stays_also_where_its_volumes_alone_are_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    environ = {"HOME": str(tmp_path), "LOGNAME": "ann"}
    home.settle(environ)
    assert environ == {"HOME": str(tmp_path), "LOGNAME": "ann"}


def test_the_user_database_comes_before_temporary_files(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = pwd.struct_passwd(("ann", "x", os.geteuid(), 0, "", str(tmp_path), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: ann)
    environ: dict[str, str] = {}
    home.settle(environ)
    assert environ == {"HOME": str(tmp_path)}
    assert not list(temporary.iterdir())


@pytest.mark.usefixtures("_nameless")
def test_a_folder_that_somebody_put_there_is_no_home(temporary: Path, tmp_path: Path) -> None:
    (temporary / f"sie-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(SettingError, match=r"HOME: unset, and .* name a folder"):
        home.settle({})


@pytest.mark.usefixtures("_nameless")
def test_where_nothing_can_be_written_the_settings_decide(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    environ: dict[str, str] = {}
    home.settle(environ)
    assert environ["HOME"] == str(temporary / "missing" / f"sie-{os.geteuid()}")
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize(("named", "command"), [(None, "settings"), ("/nonexistent", "keys list"), ("/", "--help")])
def test_commands_of_a_user_whom_nobody_knows(named: str | None, command: str, temporary: Path) -> None:
    temporary.chmod(0o1777)
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(temporary), **({} if named is None else {"HOME": named})}
    done = subprocess.run(
        [*AS_NOBODY_KNOWN, sys.executable, "-m", "sie_cli", *command.split()],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert f"{temporary}/sie-{UID}" in done.stderr
    assert done.returncode == 0 or command == "keys list", done.stderr
    folder = temporary / f"sie-{UID}"
    assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (UID, 0o700)
