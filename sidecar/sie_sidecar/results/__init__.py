"""The outcome of each item: its result goes to the gateway that waits, its message is settled, poison becomes a dead
letter.
"""
