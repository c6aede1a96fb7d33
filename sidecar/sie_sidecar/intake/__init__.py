"""Deliveries come in: `pull` asks the consumers of the lane's pool, `intake` leases, checks and gathers each item."""
