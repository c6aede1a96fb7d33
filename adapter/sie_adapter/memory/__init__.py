"""Device memory: residency of models, learnt limits of batches, and remedies when memory runs out."""
