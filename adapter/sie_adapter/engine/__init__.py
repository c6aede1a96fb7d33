"""The engine: one thread for each device runs batches of loaded models, with CUDA graphs, timings and spans."""
