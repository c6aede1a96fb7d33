"""Batches of work items. `batch` decides, without I/O, when a batch is sealed and which work items are in it. `sizing`
computes how large a batch may be, how long deliveries are gathered, and how fast the device is.
"""
