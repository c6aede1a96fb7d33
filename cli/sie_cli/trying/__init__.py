"""`sie try` and `sie run`: a model's answer in the terminal.

inputs   what is asked: texts, standard input, files
asking   the verb that a model and the options call for, and the answer
shown    an answer for a person
bars     bars, heat maps and marked texts, of which that is made
command  the commands
"""

from sie_cli.trying.command import run_model, try_model

__all__ = ["run_model", "try_model"]
