"""Engine of the adapter: it runs batches on one device with the loaded models, by torch or an engine of a package."""
