"""Work in JetStream: create streams and consumers, store large inputs, publish chunks of requests, count messages."""
