"""Workers, and which model runs where: heartbeats in `workers`, lanes in `lanes`, the placement table from `planner`
and `placement`, pools and their reservations, demand and scaling.
"""
