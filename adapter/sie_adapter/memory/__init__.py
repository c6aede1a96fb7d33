"""Device memory: which models stay loaded, the limits learnt for batches, and the remedies when memory runs out."""
