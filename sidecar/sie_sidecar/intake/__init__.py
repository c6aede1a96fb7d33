"""Deliveries come in: `pull` asks the consumers of the lane's pool, `leases` renews what is held, `intake` checks each
item.
"""
