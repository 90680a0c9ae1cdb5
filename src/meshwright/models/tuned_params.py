"""Parameters of a run that fine-tunes: its model's, and those that adapters or a reference add."""

from meshwright.fine_tuning import FineTune
from meshwright.models.adapters import adapted_params
from meshwright.models.preferences import with_reference_params
from meshwright.sharding.params import Stored, Tree


def tuned_params(params: Tree, tuning: FineTune, compute_dtype: Stored) -> Tree:
    """Returns the descriptions of a run's parameters. params: of its model. Raises as `adapted_params`."""
    if tuning.method == "lora":
        return adapted_params(params, tuning, compute_dtype)
    return with_reference_params(params, compute_dtype) if tuning.objective == "preferences" else params
