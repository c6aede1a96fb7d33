"""Work in JetStream: creates streams and consumers, publishes the chunks of requests with their inputs, and counts
waiting messages.
"""
