"""Optimizers: optax's update rules by name, learning-rate schedules, and the state's placement.

Clipping is part of the gradients (step/gradients.py), where the norm over all devices is one
collective.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformation as Rule

from meshwright.config import MeshShape, Optimizer, Training
from meshwright.errors import ConfigError, foreign_code, nearest
from meshwright.plugins import resolve
from meshwright.sharding.params import Param, Tree, is_param, named_leaves, tree_map
from meshwright.sharding.placement import Placement, like_param
from meshwright.step.state import UpdateRule, float32_update
from meshwright.update_rules import UPDATE_RULES, UpdateRow


def _cosine(o: Optimizer, intervals: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(o.learning_rate, intervals, alpha=o.final_lr_fraction)


def _linear(o: Optimizer, intervals: int) -> optax.Schedule:
    last = o.learning_rate * o.final_lr_fraction
    return optax.linear_schedule(o.learning_rate, last, intervals)


def _wsd(o: Optimizer, intervals: int) -> optax.Schedule:
    decay = math.ceil(intervals / 5)
    last = o.learning_rate * o.final_lr_fraction
    return optax.linear_schedule(o.learning_rate, last, decay, transition_begin=intervals - decay)


def _constant(o: Optimizer, intervals: int) -> optax.Schedule:
    return optax.constant_schedule(o.learning_rate)


LR_SCHEDULES: dict[str, Callable[[Optimizer, int], optax.Schedule]] = {
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
    "constant": _constant,
}
"""Learning-rate schedules: `(config, intervals from the step with the peak to the last step) ->
schedule`.

A schedule has the peak at count 0 and the rate of the last step at count `intervals`: n steps have
n - 1 intervals."""


def build_lr_schedule(o: Optimizer, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step s = 0 ... n - 1 of a run of n steps.

    With peak p, final fraction f, and w = min(warmup_steps, n - 1) steps of warm-up, the step b =
    max(w - 1, 0) has the peak, d = n - 1 - b intervals follow it, and x = (s - b) / d is the
    fraction of them at step s:

        s < b     p (s + 1) / w
        s >= b    constant    p
                  linear      p (1 - (1 - f) x)
                  cosine      p (1 - (1 - f) (1 - cos(pi x)) / 2)
                  wsd         p (1 - (1 - f) max(0, s - (n - 1 - c)) / c), where c = ceil(d / 5)

    One step has the peak, and the last step has the rate p f. A run of one step takes it at the
    peak. Further steps keep the rate of the last.

    Raises ConfigError where the schedule has no known name, or where the function of one from
    outside fails.
    """
    warmup = min(o.warmup_steps, max(steps - 1, 0))
    peak_step = max(warmup - 1, 0)
    intervals = max(steps - 1 - peak_step, 1)
    schedule = resolve("learning-rate schedule", o.lr_schedule, LR_SCHEDULES)
    with foreign_code(f"learning-rate schedule {o.lr_schedule}", "correct the function"):
        after: optax.Schedule = schedule(o, intervals)
    if not peak_step:
        return after
    # The first step already moves: warm-up starts at peak / warmup, not at zero.
    rise = optax.linear_schedule(o.learning_rate / warmup, o.learning_rate, peak_step)
    return optax.join_schedules([rise, after], [peak_step])


def decays(params: Tree) -> Tree:
    """Weight decay applies to weight matrices and embeddings, not to norms and biases."""
    return tree_map(lambda p: p.init == "normal" or p.role is not None, params)


def adamw(o: Optimizer, rate: optax.Schedule, params: Tree) -> Rule:
    """Returns AdamW (arXiv:1711.05101). params: descriptions."""
    options = {"mu_dtype": o.moment_dtype, "weight_decay": o.weight_decay, "mask": decays(params)}
    return optax.adamw(rate, o.beta1, o.beta2, eps=o.epsilon, **options)


def lion(o: Optimizer, rate: optax.Schedule, params: Tree) -> Rule:
    """Returns Lion (arXiv:2302.06675). params: descriptions."""
    return optax.lion(
        rate,
        o.beta1,
        o.beta2,
        mu_dtype=o.moment_dtype,
        weight_decay=o.weight_decay,
        mask=decays(params),
    )


def sgd(o: Optimizer, rate: optax.Schedule, params: Tree) -> Rule:
    """Returns SGD with momentum and decoupled weight decay (SGDW, arXiv:1711.05101).

    params: descriptions.
    """
    return optax.chain(
        optax.trace(o.beta1, accumulator_dtype=o.moment_dtype),
        optax.add_decayed_weights(o.weight_decay, mask=decays(params)),
        optax.scale_by_learning_rate(rate),
    )


def build_optimizer(o: Optimizer, steps: int, params: Tree) -> Rule:
    """Returns the update rule. params: descriptions, which say what weight decay applies to.

    A rule from outside is called as `(config, learning_rate)`. Raises ConfigError where it has no
    known name, fails, or does not return an optax.GradientTransformation, and for groups of
    learning rates that match no parameter.
    """
    rate = build_lr_schedule(o, steps)
    rule = resolve("optimizer", o.name)
    row = UPDATE_RULES.get(o.name)
    if row is not None:
        built: Rule = rule(o, rate, params)
    else:
        with foreign_code(f"optimizer {o.name}", "correct the function"):
            built = rule(o, rate)
        if not (hasattr(built, "init") and hasattr(built, "update")):
            raise ConfigError(
                f"optimizer {o.name}",
                f"it returned {type(built).__name__}",
                "return an optax.GradientTransformation",
            )
    if o.moment_dtype != "float32":
        _check_moment_dtype(o, row, built, params)
    if not o.lr_groups:
        return built
    # The updates of each parameter, weight decay included, times the factor of its group.
    factors = lr_factors(o.lr_groups, params)
    return optax.chain(
        built, optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, factors))
    )


def _check_moment_dtype(o: Optimizer, row: UpdateRow | None, rule: Rule, params: Tree) -> None:
    """Raises ConfigError for a type of the first moment that the state of the rule does not have.

    row: of a built-in rule; None for one from outside, whose state is made in the abstract and
    looked at.
    """
    dtype = jnp.dtype(o.moment_dtype)
    if row is not None and row.stores_first_moment:
        return
    if row is None:
        arrays = tree_map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
        with foreign_code(f"optimizer {o.name}", "correct the function"):
            state = jax.eval_shape(rule.init, arrays)
        if any(leaf.dtype == dtype for leaf in jax.tree.leaves(state)):
            return
        truth = f"its state has no array of {dtype}: it does not read `Optimizer.moment_dtype`"
    else:
        having = [name for name, row in UPDATE_RULES.items() if row.stores_first_moment]
        truth = f"it stores no first moment; those that do are {', '.join(having)}"
    raise ConfigError(
        f"--optimizer.moment-dtype {o.moment_dtype} with {o.name}",
        truth,
        "--optimizer.moment-dtype float32, or another --optimizer.name",
    )


def lr_factors(groups: tuple[str, ...], params: Tree) -> Tree:
    """Returns the factor on each parameter's learning rate: of the first group that matches, or 1.

    groups: PATTERN=FACTOR each (`Optimizer.lr_groups`).  params: descriptions. Raises ConfigError
    for a group that is not PATTERN=FACTOR, and for a pattern that no parameter is left for.
    """
    leaves = named_leaves(params)
    chosen: dict[str, _LrGroup] = {}
    for group in [_LrGroup.parse(text) for text in groups]:
        matched = [path for path, p in leaves.items() if group.matches(path, p)]
        remaining = [path for path in matched if path not in chosen]
        if not remaining:
            raise _without_effect(group, matched, leaves, chosen)
        chosen |= dict.fromkeys(remaining, group)
    factors = [chosen[path].factor if path in chosen else 1.0 for path in leaves]
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_param), factors)


@dataclasses.dataclass(frozen=True)
class _LrGroup:
    """Parameters with a factor on their learning rate: PATTERN=FACTOR."""

    text: str
    pattern: str
    """Path, with `*` for any part of it, or `role:` and a role."""
    factor: float

    @classmethod
    def parse(cls, text: str) -> "_LrGroup":
        """Parses a group. Raises ConfigError."""
        pattern, _, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = -1.0
        if not pattern or not 0 <= factor < math.inf:
            raise ConfigError(
                f"--optimizer.lr-groups {text}",
                "a group is PATTERN=FACTOR: parameters, and a factor on the learning rate of 0 or "
                "more",
                "for example embed=0.1, 'blocks.*norm*=2' or role:router=0.5",
            )
        return cls(text, pattern, factor)

    def matches(self, path: str, p: Param) -> bool:
        """Returns whether a parameter has the path or the role of the pattern."""
        kind, _, role = self.pattern.partition(":")
        if kind == "role":
            return p.role == role
        return fnmatch.fnmatchcase(path, self.pattern)


def _without_effect(
    group: _LrGroup, matched: list[str], leaves: dict[str, Param], chosen: dict[str, _LrGroup]
) -> ConfigError:
    """Returns the error of a group for which no parameter is left. chosen: by the groups before."""
    asked = f"--optimizer.lr-groups {group.text}"
    if matched:
        earlier = chosen[matched[0]].text
        names = ", ".join(matched[:3])
        taken = f"the first pattern that matches counts, and {names} went to {earlier}"
        return ConfigError(asked, taken, f"{group.text} before {earlier}")
    if group.pattern.startswith("role:"):
        roles = sorted({str(p.role) for p in leaves.values() if p.role is not None})
        unknown = f"no parameter of this model has that role; the roles are {', '.join(roles)}"
        return ConfigError(asked, unknown, nearest(group.pattern.removeprefix("role:"), roles))
    unknown = f"no parameter has such a path; the paths are {', '.join(leaves)}"
    return ConfigError(asked, unknown, nearest(group.pattern, list(leaves)))


def build_update_rule(
    o: Optimizer, training: Training, params: Tree, layer_map: Any = None
) -> UpdateRule:
    """Returns the update of parameters of the run's `param_dtype`. params: descriptions.

    Raises as build_optimizer.

    layer_map: a `LayerMap` (step/matrices.py) for rules that take matrices; without it they only
    make state.
    """
    rule = build_optimizer(o, training.steps, params)
    if layer_map is not None:
        rule = Rule(
            rule.init,
            functools.partial(optax.with_extra_args_support(rule).update, layer_map=layer_map),
        )
    if training.param_dtype == "bfloat16":
        with_rounding = resolve("parameter rounding", training.param_rounding)
        built: UpdateRule = with_rounding(rule, training.seed, params)
        return built
    return float32_update(rule)


def place_optimizer_state(
    optimizer: UpdateRule, abstract_params: Tree, placements: Tree, mesh: MeshShape
) -> tuple[Any, list[Placement]]:
    """Returns the abstract optimizer state and the placement of each of its arrays.

    An array that belongs to a parameter is placed like it (`like_param`); anything else is
    replicated.
    abstract_params: tree of ShapeDtypeStruct.  placements: the same tree of Placements.
    """
    state = jax.eval_shape(optimizer.init, abstract_params)
    flat = jax.tree_util.tree_flatten_with_path(abstract_params)[0]
    by_path = {
        path: (p, where) for (path, p), where in zip(flat, jax.tree.leaves(placements), strict=True)
    }

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Placement:
        # optax keeps what belongs to a parameter below that parameter's own path: mu.blocks.query,
        # or, where a rule keeps several arrays for each, factors.blocks.query[0].
        for start in range(len(path)):
            for stop in range(len(path), start, -1):
                if path[start:stop] in by_path:
                    param, where = by_path[path[start:stop]]
                    return like_param(leaf.shape, param.shape, where.optimizer, mesh)
        return ((),) * len(leaf.shape)

    return state, [
        place(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    ]
