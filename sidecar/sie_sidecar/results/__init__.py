"""The outcome of each item: its lease is renewed until then, its result goes to the gateway that waits, its message is
settled, poison becomes a dead letter.
"""
