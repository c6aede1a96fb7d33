"""Sinks: vector databases to which jobs write. There is one interface, and a module for each kind of database."""
