"""The engine runs batches of loaded models on one device, with CUDA graphs, timings and spans."""
