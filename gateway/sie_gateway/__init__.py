"""The HTTP edge of the cluster: resolve names, validate requests, choose a lane (pool, machine profile and bundle),
publish work, collect results. It has no model code and does not import torch.
"""
