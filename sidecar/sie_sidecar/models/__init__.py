"""Models that this worker serves: their states, loading and unloading, and LoRAs."""
