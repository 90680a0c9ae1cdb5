"""Sections of `meshwright bench hardware`: what a machine is, computes correctly,
and reaches, in one sitting.

Every section runs in a process of its own under a time limit, so that a compiler that aborts or a
collective that hangs ends that section alone.
"""
