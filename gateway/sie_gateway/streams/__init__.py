"""JetStream: streams and consumers of lanes, publishing of work items with their payloads, and the backlog of
consumers.
"""
