"""Commands `sie try` and `sie run`: a model's answer in the terminal.

command  the commands
asking   inputs of a question, the verb for a model and the options, and the answer
shown    the answer for a person: bars, heat maps and marked texts
"""

from sie_cli.trying.command import run_model, try_model

__all__ = ["run_model", "try_model"]
