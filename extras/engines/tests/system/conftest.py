"""Fixtures of this folder."""

from support.system import *  # noqa: F403
