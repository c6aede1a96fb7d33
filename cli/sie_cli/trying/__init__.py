"""`sie try` and `sie run`: a model's answer in the terminal.

command  the commands
asking   texts and files that are asked about, the verb that a model and the options call for, and the answer
shown    an answer for a person: bars, heat maps and marked texts
"""

from sie_cli.trying.command import run_model, try_model

__all__ = ["run_model", "try_model"]
