"""`sie serve`: all processes of the system on one machine, with checks, start, supervision and stop."""
