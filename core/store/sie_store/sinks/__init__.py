"""Vector databases that a job writes to: one interface, a module for each kind of database."""
