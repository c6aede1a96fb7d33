"""Commands that `sie doctor` tells people to run."""

from __future__ import annotations

import shlex

import click
from diagnosis import commands, doctor_templates

from sie_cli.main import main


def test_commands_that_doctor_tells_people_to_run_exist_with_their_options() -> None:
    """Each name and each option of every command in backticks in the texts of `sie doctor` is checked."""
    lines = {line for text in doctor_templates() for line in commands(text)}
    assert {line.split()[1] for line in lines} >= {"keys", "topology", "serve", "settings"}
    for line in lines:
        command: click.Command = main
        words = shlex.split(line)[1:]
        while words and isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        for word in words:
            options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
            assert not word.startswith("--") or word in options, line
