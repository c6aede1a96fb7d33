"""Command `sie eval`: it measures the quality and the speed of a model, from several sources side by side."""

from sie_cli.evals.command import evals

__all__ = ["evals"]
