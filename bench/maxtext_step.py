"""MaxText's train step on random tokens, for `turns.py`: `VENV/bin/python bench/maxtext_step.py [key=value ...]`.

The step is that of `maxtext.trainers.pre_train.train`, built as its training loop builds it, on the CPU devices that
XLA_FLAGS simulates. Runs in MaxText's environment and imports nothing of meshwright.
"""

import os
import sys

import turns


def main(arguments: list[str]) -> None:
    import jax
    import maxtext
    from flax import nnx
    from flax.linen import logical_axis_rules
    from maxtext.trainers.pre_train import train
    from maxtext.utils import maxtext_utils, sharding, train_utils

    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    config, recorder = train.initialize(["train", base, *arguments])
    parts = train_utils.setup_train_loop(config, recorder)
    where, mesh, state = parts[2], parts[4], parts[-1]
    model, state = nnx.split(state)
    params_where, where = sharding.maybe_update_params_sharding_with_opt(config, where)
    step, _ = train_utils.jit_train_and_eval_step(
        config, model, mesh, state, where, train.train_step, train.eval_step, None, params_where
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        shaped = maxtext_utils.get_shaped_batch(
            config, batch_sharding=sharding.get_input_data_sharding(config, mesh)
        )
        batch = train.make_synthetic_batch(config, shaped)

        def steps(count: int) -> None:
            nonlocal state
            for _ in range(count):
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)

        turns.serve(steps)


if __name__ == "__main__":
    main(sys.argv[1:])
