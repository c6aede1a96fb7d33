"""Fixtures of this folder."""

from support.component import *  # noqa: F403
