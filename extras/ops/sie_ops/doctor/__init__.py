"""Command `sie doctor`: it finds faults of a cluster and names the remedies.

A new check is a function in a file of this folder, its name in `CHECKS` of `command`, and a test of its remedy in
`test_doctor_remedies`.
"""
