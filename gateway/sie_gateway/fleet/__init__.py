"""Workers, and the placement of models on them: heartbeats and lanes in `lanes`, the placement table in `planner` and
`placement`, pools and reservations, demand, scaling, and the status sockets of workers in `workers`.
"""
