"""What every implementation of the broker waits for, and holds, at most."""

API_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 5.0
HELD_MESSAGES = 1 << 18  # for one subscription, whose handler may be slow
