"""What is done to the values of an output before they leave: one file per transformation."""
