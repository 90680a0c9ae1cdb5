"""Chips, targets, interconnect model, meshes of devices, compilers for absent hardware."""
