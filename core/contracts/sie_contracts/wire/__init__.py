"""Messages between processes: over NATS, in KV buckets, and over the Unix socket of the adapter."""
