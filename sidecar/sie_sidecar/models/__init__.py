"""Models that this worker serves: their states, loads, LoRAs and unloads."""
