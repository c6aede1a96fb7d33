"""`sie eval`: how good and how fast a model is, from several sources side by side."""

from sie_cli.evals.command import evals

__all__ = ["evals"]
