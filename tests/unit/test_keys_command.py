"""`sie keys admin`: the token that the console of a `sie serve` asks for."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from sie_cli.access import Access, published
from sie_cli.main import main


def asked(data_dir: Path) -> Result:
    return CliRunner().invoke(main, ["keys", "admin", "--data-dir", str(data_dir)])


def test_the_token_of_the_server_that_runs_is_printed_alone(tmp_path: Path) -> None:
    with published(tmp_path, Access(gateway_url="http://127.0.0.1:1", admin_token="of-this-start")):
        assert (asked(tmp_path).exit_code, asked(tmp_path).stdout) == (0, "of-this-start\n")


def test_without_a_server_it_is_refused_in_one_line(tmp_path: Path) -> None:
    done = asked(tmp_path)
    assert done.exit_code != 0
    assert done.stdout == ""
    assert f"no `sie serve` runs with {tmp_path}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_default_data_directory_without_a_server_says_which_it_looked_in(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["keys", "admin"], env={"XDG_DATA_HOME": str(tmp_path)})
    assert done.exit_code == 1
    assert f"with the data directory {tmp_path}/sie" in done.stderr
