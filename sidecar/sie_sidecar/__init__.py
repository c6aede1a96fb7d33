"""Scheduler of a worker. It pulls work items from the broker, tokenises their inputs, forms batches by number of
tokens, sends the batches to the adapter (the process with the models), and acknowledges the messages. It does not
import torch.
"""
