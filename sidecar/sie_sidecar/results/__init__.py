"""End of work items: leases are renewed until there is a result, the result is sent to the gateway that waits for it,
and the message is acknowledged. Messages whose inputs crash adapters or whose work failed too often become dead
letters.
"""
