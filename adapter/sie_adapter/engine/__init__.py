"""Engine of the adapter: it runs batches on one device with the loaded models, by torch, OpenVINO or SGLang."""
