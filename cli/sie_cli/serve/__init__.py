"""`sie serve`: every process of the system on one machine, checked, started, supervised and ended."""
