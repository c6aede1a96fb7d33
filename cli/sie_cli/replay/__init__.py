"""`sie bench`: a recorded trace runs through the scheduler under virtual time."""
