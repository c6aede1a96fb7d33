"""End of work items: leases are renewed until there is a result, the result is sent to the gateway that waits for it,
and the message is acknowledged. Inputs that crash adapters, and work that was given up, are written to the dead
letters.
"""
