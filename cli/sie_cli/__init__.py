"""The `sie` command."""
