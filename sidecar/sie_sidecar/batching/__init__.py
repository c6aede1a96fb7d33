"""Formation of batches from work items. `batch` decides, without I/O, when a batch is sealed and which work items it
has; `sizing` computes the size of batches, the gathering quantum and the rates.
"""
