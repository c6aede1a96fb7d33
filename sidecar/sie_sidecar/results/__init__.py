"""Results of work items: leases are renewed until a result exists, the result is sent to the waiting gateway, the
message is settled, and poison becomes a dead letter.
"""
