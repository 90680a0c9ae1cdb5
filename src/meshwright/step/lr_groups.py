"""Learning rates of groups of parameters, as factors on the run's."""

import fnmatch

import jax
import optax

from meshwright.errors import ConfigError, nearest
from meshwright.sharding.params import Param, Tree, is_param, named_leaves


def with_lr_groups(
    rule: optax.GradientTransformation, groups: tuple[str, ...], params: Tree
) -> optax.GradientTransformationExtraArgs:
    """Returns the rule with the updates of each parameter, weight decay included, times the factor of its group.

    groups: PATTERN=FACTOR each (`Optimizer.lr_groups`).  params: descriptions. Raises ConfigError as `lr_factors`.
    """
    factors = lr_factors(groups, params)
    scale = optax.stateless(lambda updates, _: jax.tree.map(lambda u, factor: u * factor, updates, factors))
    return optax.chain(rule, scale)


def lr_factors(groups: tuple[str, ...], params: Tree) -> Tree:
    """Returns the factor of every parameter: that of the first pattern that matches it, or 1.

    Raises ConfigError for a group that is not PATTERN=FACTOR, and for a pattern that no parameter is left for.
    """
    leaves, parsed = named_leaves(params), [_parse(group) for group in groups]
    chosen = {
        path: next((i for i, (f, _) in enumerate(parsed) if _matches(f, path, p)), None) for path, p in leaves.items()
    }
    for i, (pattern, _) in enumerate(parsed):
        if i not in chosen.values():
            _refuse(groups[i], pattern, leaves, {g: f for g, (f, _) in zip(groups, parsed, strict=True)}, chosen)
    factors = [1.0 if i is None else parsed[i][1] for i in chosen.values()]
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_param), factors)


def _matches(pattern: str, path: str, p: Param) -> bool:
    kind, _, role = pattern.partition(":")
    return p.role == role if kind == "role" else fnmatch.fnmatchcase(path, pattern)


def _parse(group: str) -> tuple[str, float]:
    pattern, equals, text = group.rpartition("=")
    try:
        factor = float(text)
    except ValueError:
        factor = -1.0
    if not equals or not pattern or not 0 <= factor < float("inf"):
        raise ConfigError(
            f"--optimizer.lr-groups {group}",
            "a group is PATTERN=FACTOR: parameters, and a factor on the learning rate of 0 or more",
            "for example embed=0.1, 'blocks.*norm*=2' or role:router=0.5",
        )
    return pattern, factor


def _refuse(
    group: str, pattern: str, leaves: dict[str, Param], patterns: dict[str, str], chosen: dict[str, int | None]
) -> None:
    """Raises the ConfigError of a pattern that chooses no parameter."""
    asked, order = f"--optimizer.lr-groups {group}", list(patterns)
    matched = [path for path, p in leaves.items() if _matches(pattern, path, p)]
    if matched:
        earlier = order[chosen[matched[0]] or 0]
        raise ConfigError(
            asked,
            f"the first pattern that matches counts, and {', '.join(matched[:3])} went to {earlier}",
            f"{group} before {earlier}",
        )
    if pattern.startswith("role:"):
        roles = sorted({str(p.role) for p in leaves.values() if p.role is not None})
        raise ConfigError(
            asked,
            f"no parameter of this model has that role; the roles are {', '.join(roles)}",
            nearest(pattern[5:], roles),
        )
    raise ConfigError(
        asked, f"no parameter has such a path; the paths are {', '.join(leaves)}", nearest(pattern, list(leaves))
    )
