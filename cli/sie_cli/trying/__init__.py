"""Commands `sie try` and `sie run`: they show a model's answer in the terminal.

command  the commands
asking   reads the inputs, chooses encode, score or extract, and calls the gateway
shown    the answer for a person: bars, heat maps and marked texts
"""

from sie_cli.trying.command import run_model, try_model

__all__ = ["run_model", "try_model"]
