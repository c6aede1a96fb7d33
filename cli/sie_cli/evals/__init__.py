"""`sie eval`: how good a model is, from several sources side by side."""

from sie_cli.evals.command import evaluate

__all__ = ["evaluate"]
