"""The home folder and the name of a user who has neither."""

from __future__ import annotations

import getpass
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie_cli import home
from sie_contracts.settings import SettingError


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
