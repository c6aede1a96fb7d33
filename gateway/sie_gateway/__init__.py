"""HTTP server for the clients of the cluster: it resolves names of models, validates requests, chooses a lane (pool,
machine profile and bundle), publishes work and collects results. It has no model code and does not import torch.
"""
