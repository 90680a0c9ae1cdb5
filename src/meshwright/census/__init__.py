"""Compile a step for any mesh and read what one device holds, computes and sends.

`take_census(function, *arguments)` reads any function; `training.census_of_train_step(program)` a run's own step.
"""

from meshwright.census.compare import compare, read_census
from meshwright.census.live import live_memory
from meshwright.census.marks import mark
from meshwright.census.take import Census, take_census

__all__ = ["Census", "compare", "live_memory", "mark", "read_census", "take_census"]
