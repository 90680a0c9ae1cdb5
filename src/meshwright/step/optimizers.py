"""Optimizers: optax's update rules by name, the learning-rate schedule, and the placement of the optimizer state.

Clipping is part of the gradients (step/gradients.py), where the norm over all devices is one collective.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from meshwright.config import MeshShape, Optimizer, Training
from meshwright.errors import ConfigError, MeshwrightError, describe_failure
from meshwright.plugins import resolve
from meshwright.sharding.params import Tree, tree_map
from meshwright.sharding.placement import Placement, like_param

_Schedules = dict[str, Callable[[Optimizer, int], optax.Schedule]]


def _wsd(o: Optimizer, steps: int) -> optax.Schedule:
    cooldown = max(steps // 5, 1)
    last = o.learning_rate * o.final_lr_fraction
    return optax.linear_schedule(o.learning_rate, last, cooldown, transition_begin=steps - cooldown)


LR_SCHEDULES: _Schedules = {
    "cosine": lambda o, steps: optax.cosine_decay_schedule(o.learning_rate, steps, alpha=o.final_lr_fraction),
    "linear": lambda o, steps: optax.linear_schedule(o.learning_rate, o.learning_rate * o.final_lr_fraction, steps),
    "wsd": _wsd,
    "constant": lambda o, steps: optax.constant_schedule(o.learning_rate),
}
"""Learning-rate schedules after warm-up: `(config, steps after warm-up) -> schedule`."""


def build_lr_schedule(o: Optimizer, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step: linear warm-up, then the schedule of the config.

    Raises ConfigError where the schedule has no known name, or where the function of one from outside fails.
    """
    warmup = min(o.warmup_steps, max(steps - 1, 0))
    schedule = resolve("learning-rate schedule", o.lr_schedule, LR_SCHEDULES)
    after: optax.Schedule = _call("learning-rate schedule", o.lr_schedule, schedule, o, max(steps - warmup, 1))
    if not warmup:
        return after
    # The first step already moves: warm-up starts at peak / warmup, not at zero.
    rise = optax.linear_schedule(o.learning_rate / warmup, o.learning_rate, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


def _adamw(o: Optimizer, rate: optax.Schedule, params: Tree) -> optax.GradientTransformation:
    return optax.adamw(
        rate,
        o.beta1,
        o.beta2,
        eps=o.epsilon,
        mu_dtype=o.moment_dtype,
        weight_decay=o.weight_decay,
        mask=decays(params),
    )


def _adafactor(o: Optimizer, rate: optax.Schedule, params: Tree) -> optax.GradientTransformation:
    from meshwright.step.adafactor import adafactor  # loaded for runs with Adafactor alone

    return adafactor(o, rate, params)


def _lion(o: Optimizer, rate: optax.Schedule, params: Tree) -> optax.GradientTransformation:
    return optax.lion(rate, o.beta1, o.beta2, mu_dtype=o.moment_dtype, weight_decay=o.weight_decay, mask=decays(params))


def _muon(o: Optimizer, rate: optax.Schedule, params: Tree) -> optax.GradientTransformation:
    from meshwright.step.muon import muon  # loaded for runs with Muon alone

    return muon(o, rate, params)


def _sgd(o: Optimizer, rate: optax.Schedule, params: Tree) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(o.weight_decay, mask=decays(params)),
        optax.sgd(rate, momentum=o.beta1, accumulator_dtype=o.moment_dtype),
    )


OPTIMIZERS: dict[str, Callable[[Optimizer, optax.Schedule, Tree], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "lion": _lion,
    "muon": _muon,
    "sgd": _sgd,
}
"""Update rules: AdamW (arXiv:1711.05101), Adafactor (1804.04235), Lion (2302.06675), Muon (K. Jordan 2024), SGD with
momentum."""

ELEMENTWISE = ("adamw", "adafactor", "lion", "sgd")
"""Rules without matrix products."""

FIRST_MOMENTS = ("adamw", "lion", "muon", "sgd")
"""Rules whose first moment can be bfloat16."""


def build_optimizer(o: Optimizer, steps: int, params: Tree) -> optax.GradientTransformation:
    """Returns the update rule. params: descriptions, which say what weight decay applies to.

    A rule from outside is called as `(config, learning_rate)`. Raises ConfigError where it has no known name, fails, or
    does not return an optax.GradientTransformation, and for groups of learning rates that match no parameter.
    """
    rule = _rule(o, steps, params)
    if not o.lr_groups:
        return rule
    from meshwright.step.lr_groups import with_lr_groups  # loaded for runs that have them

    return with_lr_groups(rule, o.lr_groups, params)


def _rule(o: Optimizer, steps: int, params: Tree) -> optax.GradientTransformation:
    rate = build_lr_schedule(o, steps)
    rule = resolve("optimizer", o.name, OPTIMIZERS)
    if o.moment_dtype != "float32" and o.name not in FIRST_MOMENTS:
        raise ConfigError(
            f"--optimizer.moment-dtype {o.moment_dtype} with {o.name}",
            f"those with a first moment of this type are {', '.join(FIRST_MOMENTS)}",
            "--optimizer.moment-dtype float32, or one of them",
        )
    if o.name in OPTIMIZERS:
        return OPTIMIZERS[o.name](o, rate, params)
    built = _call("optimizer", o.name, rule, o, rate)
    if not (hasattr(built, "init") and hasattr(built, "update")):
        raise ConfigError(
            f"optimizer {o.name}", f"it returned {type(built).__name__}", "return an optax.GradientTransformation"
        )
    transformation: optax.GradientTransformation = built
    return transformation


class UpdateRule(NamedTuple):
    """Update of the parameters, as the step calls it."""

    init: Callable[[Tree], Any]
    """`params -> state`."""
    update: Callable[[Tree, Any, Tree, jax.Array], tuple[Tree, Any]]
    """`(float32 gradients, state, params, step) -> (params, state)`."""


def build_update_rule(o: Optimizer, training: Training, params: Tree, layer_map: Any = None) -> UpdateRule:
    """Returns the update of parameters of the run's `param_dtype`. params: descriptions. Raises as build_optimizer.

    layer_map: a `LayerMap` (step/matrices.py) for rules that take whole matrices; without it they make state alone.
    """
    rule = build_optimizer(o, training.steps, params)
    if layer_map is not None:
        rule = layer_map.given_to(rule)
    if training.param_dtype == "bfloat16":
        from meshwright.step.bfloat16_params import with_masters, with_random_rounding  # loaded for runs that have them

        if training.param_rounding == "master":
            return with_masters(rule)
        return with_random_rounding(rule, training.seed)

    def update(grads: Tree, state: Any, params: Tree, step: jax.Array) -> tuple[Tree, Any]:
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return UpdateRule(rule.init, update)


def _call(kind: str, name: str, function: Any, *arguments: Any) -> Any:
    """Calls a function from outside the package; its failure becomes a ConfigError that names it."""
    try:
        return function(*arguments)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ConfigError(f"{kind} {name}", f"it {describe_failure(error)}", "correct the function") from error


def decays(params: Tree) -> Tree:
    """Weight decay applies to weight matrices and embeddings, not to norms and biases."""
    return tree_map(lambda p: p.init == "normal" or p.role is not None, params)


def place_optimizer_state(
    optimizer: UpdateRule, abstract_params: Tree, placements: Tree, mesh: MeshShape
) -> tuple[Any, list[Placement]]:
    """Returns the abstract optimizer state and the placement of each of its arrays.

    An array that belongs to a parameter is placed like it (`like_param`); anything else is replicated.
    abstract_params: tree of ShapeDtypeStruct.  placements: the same tree of Placements.
    """
    state = jax.eval_shape(optimizer.init, abstract_params)
    flat = jax.tree_util.tree_flatten_with_path(abstract_params)[0]
    by_path = {path: (p, where) for (path, p), where in zip(flat, jax.tree.leaves(placements), strict=True)}

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Placement:
        # optax keeps what belongs to a parameter below that parameter's own path: mu.blocks.query, or, where a rule
        # keeps several arrays for each, factors.blocks.query[0].
        for start in range(len(path)):
            for stop in range(len(path), start, -1):
                if path[start:stop] in by_path:
                    param, where = by_path[path[start:stop]]
                    return like_param(leaf.shape, param.shape, where.optimizer, mesh)
        return ((),) * len(leaf.shape)

    return state, [place(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]]
