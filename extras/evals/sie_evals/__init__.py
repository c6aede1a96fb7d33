"""Command `sie eval`: measure the quality and the speed of a model, and compare several sources of its answers."""
