"""Command `sie doctor`: it finds faults of a cluster and names the remedies."""

from sie_cli.doctor.command import doctor

__all__ = ["doctor"]
