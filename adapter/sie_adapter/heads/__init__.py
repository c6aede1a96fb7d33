"""What turns hidden states into the values of an output: one file per output."""
