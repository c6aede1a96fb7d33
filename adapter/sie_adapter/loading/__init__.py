"""Load of a model from its folder: inspection of the files, reading of the weights, checks of the results."""
