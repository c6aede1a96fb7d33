"""Memory of the device: which models are loaded, measured limits for the tokens of a pass, and what is freed when
memory runs out.
"""
