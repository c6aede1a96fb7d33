"""Command `sie eval`: measure the quality and the speed of a model, and compare several sources of its answers.

A new task is a function in `tasks`, a new source a `Source` with its name in `opened`, a new output a row in `outputs`.
A new figure is computed in `quality` or `perf` and has its column in `report`.
"""
