"""Built-in optimizers, one row each: what builds the rule, what state it keeps,
and what an update costs.

Everything that the package knows of a rule stands in its row. The function that builds it is named
by a string, because it loads optax, which plans and the command line do not need.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class UpdateRow:
    """Facts of a built-in update rule."""

    build: str
    """`module:function` of the package, `(config, learning-rate schedule, descriptions) -> optax
    transformation`."""
    bytes_moved: int
    """HBM bytes that an update reads and writes per parameter,
    with gradients, norm and clipping."""
    moments: int | None
    """Arrays of a parameter's shape in the state: the first
    in `Optimizer.moment_dtype`, the others in float32.

    0 for no state, None for arrays of other shapes: then the planner makes the state in the
    abstract and counts it."""
    matrices: bool = False
    """Whether it multiplies the matrices of layers (Muon): of the parameters that
    `step.muon.orthogonalised` names.

    Its update takes a `LayerMap`, and needs to know which dimensions of a parameter are layers and
    heads. The other parameters have AdamW's state. Rules without it are elementwise, or nearly
    so."""

    @property
    def stores_first_moment(self) -> bool:
        """Whether the state has a first moment, stored in `Optimizer.moment_dtype`."""
        return bool(self.moments)


UPDATE_RULES: dict[str, UpdateRow] = {
    "adamw": UpdateRow("step.optimizers:adamw", bytes_moved=32, moments=2),
    "adafactor": UpdateRow("step.layer_rules:adafactor", bytes_moved=24, moments=None),
    "lion": UpdateRow("step.optimizers:lion", bytes_moved=24, moments=1),
    "muon": UpdateRow("step.layer_rules:muon", bytes_moved=40, moments=1, matrices=True),
    "sgd": UpdateRow("step.optimizers:sgd", bytes_moved=24, moments=1),
}
"""Built-in optimizers by the name that a run gives (`--optimizer.name`)."""


def takes_layers(name: str) -> bool:
    """Returns whether the update of an optimizer may ask
    for complete layers: built-in ones say so, others may."""
    row = UPDATE_RULES.get(name)
    return row is None or row.matrices
