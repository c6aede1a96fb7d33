"""Intake of deliveries: `pull` requests messages from the consumers of the lane's pool, `intake` leases, checks and
gathers each work item.
"""
