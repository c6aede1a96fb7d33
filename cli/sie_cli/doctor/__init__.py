"""`sie doctor`: what is wrong with a cluster, and what mends it."""

from sie_cli.doctor.command import doctor

__all__ = ["doctor"]
