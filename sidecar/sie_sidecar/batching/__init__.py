"""Work items become batches. `batch` decides, without I/O, when a batch is sealed and which work items it has;
`sizing` has the size of batches, the gathering quantum and the rates.
"""
