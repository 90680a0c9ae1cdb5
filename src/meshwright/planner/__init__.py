"""Planner: predicted memory, communication and step time of a run on any hardware,
and a search over meshes."""
