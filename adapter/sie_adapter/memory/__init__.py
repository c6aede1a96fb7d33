"""Device memory: which models stay loaded, learnt limits of batches, and what is done when memory runs out."""
