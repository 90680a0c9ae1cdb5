"""Reads any compiled JAX function: what it stores, what it sends, what it multiplies, how long it may take.

It needs JAX and numpy, and runs nothing: the facts are those of the compiled program's text.
"""
