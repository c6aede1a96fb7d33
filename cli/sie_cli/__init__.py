"""The `sie` command."""

from sie_cli.first_process import end_on_signals

end_on_signals()  # before anything else is imported, which takes seconds
