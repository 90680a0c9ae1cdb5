"""Collectives of the step, named and differentiable, and their hierarchical forms over slices."""
