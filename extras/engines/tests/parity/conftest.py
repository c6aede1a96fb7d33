"""Fixtures of this folder."""

from support.parity import *  # noqa: F403
