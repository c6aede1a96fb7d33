"""Outcome of each work item: its lease is renewed until then, its result goes to the gateway that waits, its message is
settled, and poison becomes a dead letter.
"""
