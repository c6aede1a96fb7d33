"""The data directory of `sie serve`, and the home folder of a user who has none."""

from __future__ import annotations

import getpass
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie_cli import access, home
from sie_cli.access import Access
from sie_cli.data_dir import MAX_SOCKET_BYTES, default_data_dir, locked_data_dir, socket_path, sockets_folder
from sie_contracts.settings import SettingError

LONG = "a-home-with-a-rather-long-name" * 4


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a new directory for temporary files, in place of that of pytest."""
    with tempfile.TemporaryDirectory(prefix="sie-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.parametrize(
    ("named", "folder"),
    [("/data", "/data/sie"), ("", "/home/ann/.local/share/sie"), ("a", "/home/ann/.local/share/sie")],
)
def test_a_folder_for_data_is_taken_where_it_is_absolute(
    named: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The XDG Base Directory Specification ignores a relative path."""
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("XDG_DATA_HOME", named)
    assert default_data_dir() == Path(folder)


def test_sockets_are_in_the_data_directory_where_their_path_may_be_that_long(temporary: Path) -> None:
    assert socket_path(Path("/var/lib/sie"), 0) == Path("/var/lib/sie/run/worker-0.sock")


def test_sockets_of_a_long_path_are_elsewhere_private_and_not_left_behind(temporary: Path, tmp_path: Path) -> None:
    path = tmp_path / LONG
    with locked_data_dir(path):
        folder = sockets_folder(path)
        assert (folder.parent, stat.S_IMODE(folder.stat().st_mode)) == (temporary, 0o700)
        assert len(str(socket_path(path, 999))) <= MAX_SOCKET_BYTES
        assert sockets_folder(tmp_path / (LONG + "-of-another")) != folder
    assert not folder.exists()


def test_the_addresses_of_a_killed_server_are_gone_when_the_next_one_starts(temporary: Path, tmp_path: Path) -> None:
    """Commands send the token of an administrator to the addresses that they find."""
    with locked_data_dir(tmp_path):
        access.publish(tmp_path, Access(gateway_url="http://127.0.0.1:8080", admin_token="of-the-killed-one"))
    assert access.read(tmp_path) is None
    with locked_data_dir(tmp_path):
        assert access.read(tmp_path) is None


def test_a_folder_that_somebody_put_there_is_refused(temporary: Path, tmp_path: Path) -> None:
    path = tmp_path / LONG
    sockets_folder(path).symlink_to(tmp_path)
    with pytest.raises(SettingError, match="name a data directory with a path short"), locked_data_dir(path):
        pytest.fail("it was taken")


def test_what_is_in_it_is_private_whatever_the_folder_is(temporary: Path) -> None:
    path = temporary / "data"
    path.mkdir()
    path.chmod(0o755)
    (path / "run").mkdir()
    (path / "run").chmod(0o755)
    with locked_data_dir(path):
        assert [stat.S_IMODE((path / name).stat().st_mode) for name in ("run", "lock")] == [0o700, 0o600]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_a_folder_where_everybody_may_write_is_refused(temporary: Path, mode: int) -> None:
    path = temporary / "data"
    path.mkdir()
    path.chmod(mode)
    with (
        pytest.raises(SettingError, match=r"every user of this machine may write there \(mode 0?1?7[57]7\).*chmod o-w"),
        locked_data_dir(path),
    ):
        pytest.fail("it was taken")


# a user without a home


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
