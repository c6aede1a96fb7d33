"""Work in JetStream: create streams and consumers, publish chunks of requests, count waiting messages."""
