"""Censuses of a run's own steps, by `xlacensus`, which reads any compiled program.

`programs.census(function, *args)` compiles and reads any function; `run_census` the steps of a run.
"""
