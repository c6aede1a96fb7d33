"""Memory of the device: loaded models, measured limits for the tokens of a pass, and steps when memory runs out."""
