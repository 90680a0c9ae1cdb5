"""Low-precision matmuls: fp8, MXFP8 and int8 products of activations, weights and gradients.

All three products of a layer's matmul (forward, gradient of the input, gradient of the weight) have
low-precision operands in the `dot_general` itself; the scales multiply its result. A
quantise-dequantise pair that is written out around a bfloat16 product would be simplified away by
XLA.

Scales of the fp8 formats are powers of two. A float's rounding does not depend on a power of two,
so that two devices with different scales round alike: no maximum is sent, and the numbers do not
depend on the mesh. Only elements below 2^-15 of their group's largest (e4m3; 2^-30 in e5m2) are
rounded more coarsely. int8 has a fixed step, which the scale sets: there the maximum is taken over
all devices that share a row or column.

Grouped matmuls of experts have one recipe, in the fp8 formats only: e4m3 with a scale for each row
of activations and for each expert's weight, and gradients in e4m3 too, as in DeepSeek-V3
(arXiv:2412.19437, section 3.3.2). Triton multiplies operands of one format, and has no product of
MX blocks.

Sources: fp8 formats and training with them, Micikevicius et al. 2022 (arXiv:2209.05433);
MXFP8, OCP Microscaling Formats 1.0.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from meshwright import plugins
from meshwright.comm.collectives import all_reduce_max, row_major
from meshwright.comm.hierarchical import Axes, hierarchical_all_gather
from meshwright.errors import ConfigError
from meshwright.hardware.chips import CHIPS, Chip
from meshwright.hardware.machine import Machine
from meshwright.models.blocks.layers import SelfMultiplying
from meshwright.models.kernels.choose import GroupedMatmul, GroupedProducts
from meshwright.sharding.layouts import TOKEN_AXES
from meshwright.sharding.params import GatherParams, Param, RoundedParam, Tree, named_leaves
from meshwright.sharding.placement import Placements

SCOPE = "low precision"
"""Named scope of the matmuls, by which the census finds them in the compiled program."""


@dataclasses.dataclass(frozen=True)
class MatmulPrecision:
    """Recipe of low-precision matmuls: formats of the operands, and what shares a scale.

    Example:
        >>> from meshwright.models.quantisation import MatmulPrecision
        >>> summary = "e4m3 for gradients too"
        >>> MatmulPrecision("fp8_e4m3", summary, "fp8", "tensor", gradient="float8_e4m3fn").operand
        'float8_e4m3fn'
    """

    name: str
    """Name in options, logs and lints."""
    summary: str
    """One-line description."""
    rate: Literal["fp8", "int8", "mxfp8", "nvfp4"]
    """Peak of a chip that it uses: the field `flops_fp8`, `flops_int8`, `flops_mxfp8`
    or `flops_nvfp4`."""
    scaling: Literal["tensor", "row", "mx"]
    """What shares a scale: a device's block of a tensor; a row or column of an operand; or MX
    blocks of `block` elements along the contracted dimension, with exponents for scales."""
    operand: str = "float8_e4m3fn"
    """Format of activations and weights."""
    gradient: str = "float8_e5m2"
    """Format of the gradients of activations."""
    block: int = 0
    """Elements of a block, for the scaling `mx`."""

    def __post_init__(self) -> None:
        if self.scaling != "row" and "int8" in (self.operand, self.gradient):
            raise ConfigError(
                f"matmul precision {self.name!r}: int8 scaled by {self.scaling}",
                "an integer's step is its scale, which rows and columns must share",
                'scaling="row"',
            )


RECIPES: dict[str, MatmulPrecision] = {
    recipe.name: recipe
    for recipe in (
        MatmulPrecision(
            "fp8", "e4m3, gradients e5m2, one scale per tensor and device", "fp8", "tensor"
        ),
        MatmulPrecision(
            "fp8_rowwise", "e4m3, gradients e5m2, a scale per row and column", "fp8", "row"
        ),
        MatmulPrecision(
            "mxfp8",
            "e4m3 in blocks of 32 with e8m0 scales (OCP MX)",
            "mxfp8",
            "mx",
            gradient="float8_e4m3fn",
            block=32,
        ),
        MatmulPrecision(
            "int8",
            "int8, a scale per row and column",
            "int8",
            "row",
            operand="int8",
            gradient="int8",
        ),
    )
}
"""Recipes by the name that `--training.matmul-precision` takes."""


def find_precision(name: str) -> MatmulPrecision:
    """Returns the recipe called `name`: a row of RECIPES,
    or a `MatmulPrecision` named as `module:attribute`."""
    recipe = plugins.resolve("matmul precision", name, {**RECIPES, "compute": None})
    asked = f"--training.matmul-precision {name}"
    return plugins.expect(recipe, MatmulPrecision, asked, "a meshwright MatmulPrecision")


def check_precision(name: str, machine: Machine) -> None:
    """Raises ConfigError where a machine gains nothing from a recipe; the CPU simulates them all.

    An accelerator that is not in `CHIPS` is left to its compiler.
    """
    if name == "compute":
        return
    recipe, chip = find_precision(name), machine.chip
    if recipe.rate == "nvfp4" and not machine.installed:
        raise ConfigError(
            f"--training.matmul-precision {name}",
            "it is in NVFP4, of which XLA has no product: its steps can be priced, and not run",
            "--training.matmul-precision mxfp8",
        )

    def is_faster(chip: Chip, recipe: MatmulPrecision) -> bool:
        return getattr(chip, f"flops_{recipe.rate}") is not None

    if not machine.simulated and chip is not None and not is_faster(chip, recipe):
        fast = [name for name, other in RECIPES.items() if is_faster(chip, other)]
        having = [name for name, other in CHIPS.items() if is_faster(other, recipe)]
        raise ConfigError(
            f"--training.matmul-precision {name} on {chip.name}",
            f"it has no flops_{recipe.rate}: its compiler gains nothing from such operands; "
            f"{', '.join(having)} have",
            f"--training.matmul-precision {' or '.join((*fast, 'compute'))}",
        )


@dataclasses.dataclass(frozen=True)
class WeightPlan:
    """Facts of a weight that its quantised matmuls need."""

    recipe: MatmulPrecision
    contract: int
    """Dimensions that the matmul contracts: the first ones."""
    in_axes: Axes
    """Mesh axes that split the contracted dimensions of the gathered weight."""
    out_axes: Axes
    """Mesh axes that split its other dimensions."""
    shares: tuple[int, ...] | None
    """Dimensions along which elements share a scale; None are all.
    MX blocks have no scale before the product."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scale", "carrier"],
    meta_fields=["plan"],
)
@dataclasses.dataclass(frozen=True)
class LowPrecisionWeight(SelfMultiplying):
    """Gathered weight of a low-precision matmul; `linear` multiplies by it."""

    values: jax.Array
    """Quantised weight; for MX blocks the weight in the compute dtype, quantised
    in each product."""
    scale: jax.Array | None
    """Float32 factor of `values`: a scalar, or one per output column; None for MX blocks."""
    carrier: jax.Array | None
    """Gathered weight in the compute dtype. Its value is never read (and never gathered); its
    cotangent is the gradient, since integers have no cotangents, and fp8 values would have fp8
    cotangents."""
    plan: WeightPlan

    option = "--training.matmul-precision"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.values.shape

    def linear(self, x: jax.Array, contract: int) -> jax.Array:
        """Returns the product, of which both operands and those of its gradients are quantised."""
        assert contract == self.plan.contract, (contract, self.plan.contract)
        inner = math.prod(self.shape[:contract])
        x_TD, values_DF = x.reshape(-1, inner), self.values.reshape(inner, -1)
        if self.scale is None or self.carrier is None:
            y_TF = _multiply_in_blocks(x_TD, values_DF, self.plan)
        else:
            scale = self.scale if self.scale.ndim == 0 else self.scale.reshape(1, -1)
            y_TF = _multiply(x_TD, values_DF, scale, self.carrier.reshape(inner, -1), self.plan)
        return y_TF.reshape(*x.shape[: x.ndim - contract], *self.shape[contract:])


@dataclasses.dataclass(frozen=True)
class LowPrecisionGather(GatherParams):
    """Gathers sharded parameters into weights: low-precision ones quantised, half the bytes
    of bfloat16."""

    plans: Mapping[str, WeightPlan]
    """Plan of each weight in low precision, by path."""

    def __call__(self, params: Tree, path: str) -> Tree:
        """Returns the weights of the subtree `path`, of one layer of it where it is stacked."""

        originals = jax.tree.map(_original, params, is_leaf=_is_rounded)
        weights = super().__call__(originals, path)
        quantised = self._early(params, path)

        def in_low_precision(keys: Any, weight: jax.Array) -> Any:
            name = _name_of(path, keys)
            plan = self.plans.get(name)
            if plan is None:
                return weight
            if name not in quantised:
                return LowPrecisionWeight(weight, None, None, plan)
            values, scale = quantised[name]
            return LowPrecisionWeight(values, scale, weight, plan)

        return jax.tree_util.tree_map_with_path(in_low_precision, weights)

    def _early(self, params: Tree, path: str) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns gathered values and scales of the weights of a subtree
        that are rounded before they are gathered."""
        treedef: Any
        leaves, treedef = jax.tree_util.tree_flatten_with_path(params, _is_rounded)
        rounded: dict[str, tuple[jax.Array, jax.Array]] = {}
        shards: dict[str, tuple[jax.Array, Any]] = {}
        for (keys, param), plan in zip(
            leaves, treedef.flatten_up_to(self.gathers[path]), strict=True
        ):
            name = _name_of(path, keys)
            if not self._is_early(name):
                continue
            if isinstance(param, RoundedParam):
                rounded[name] = (param.values, param.scale)
            else:
                shards[name] = (row_major(param), plan.gathers)
        return rounded | self._quantise(shards)

    def _is_early(self, name: str) -> bool:
        """Whether a weight is rounded before it is gathered: elsewhere its products round it."""
        plan = self.plans.get(name)
        return plan is not None and (plan.shares is not None or plan.recipe.scaling != "mx")

    def rounded(self, params: Tree, path: str) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Rounds all rows of the weights of a stack that are rounded early and not gathered."""
        full_names: dict[str, str] = {}
        for name, plan in self.gathers[path].items():
            full_name = f"{path}.{name}"
            if not plan.gathers and self._is_early(full_name):
                full_names[name] = full_name
        if not full_names:
            return {}
        stacks = {
            full_name: row_major(lax.stop_gradient(params[name]))
            for name, full_name in full_names.items()
        }
        found = jax.vmap(self._quantise_local)(stacks)
        return {name: found[full_name] for name, full_name in full_names.items()}

    def _quantise_local(
        self, weights: dict[str, jax.Array]
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Quantises weights that are not gathered."""
        return self._quantise({name: (weight, ()) for name, weight in weights.items()})

    def _quantise(
        self, shards: dict[str, tuple[jax.Array, Any]]
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Quantises shards and gathers them, each with its scale: the scale is known
        before the gather."""
        amax, axes_of = {}, {}
        for name, (w, gathers) in shards.items():
            plan = self.plans[name]
            dims = plan.shares
            with jax.named_scope(name):
                amax[name] = largest_along(lax.stop_gradient(w), dims)
            shared = [a for axes, dim in gathers if dims is None or dim in dims for a in axes]
            axes_of[name] = tuple(shared) + (plan.in_axes if plan.recipe.operand == "int8" else ())
        with jax.named_scope("scales of weights"):
            amax = _max_in_groups(amax, axes_of)
        result = {}
        for name, (w, gathers) in shards.items():
            plan = self.plans[name]
            with jax.named_scope(name):
                values, scale = quantise(lax.stop_gradient(w), amax[name], plan.recipe.operand)
                for axes, dim in gathers:
                    values = hierarchical_all_gather(values, axes, dim, self.dcn)
                    if plan.shares is not None and dim not in plan.shares:
                        scale = hierarchical_all_gather(scale, axes, dim, self.dcn)
            result[name] = (values, scale)
        return result


def _is_rounded(param: Any) -> bool:
    return isinstance(param, RoundedParam)


def _original(param: Any) -> Any:
    """Returns the parameter that takes the gradient."""
    return param.param if isinstance(param, RoundedParam) else param


def _name_of(path: str, keys: Any) -> str:
    """Returns the path of a parameter: that of its subtree and its keys there."""
    return ".".join((path, *(key.key for key in keys)))


def low_precision_gather(
    gather: GatherParams,
    params: Tree,
    placements: Tree,
    name: str,
    quantises: Callable[[Param], bool],
) -> LowPrecisionGather:
    """Returns `gather` with the weights that `quantises` selects quantised by the recipe `name`."""
    recipe, plans = find_precision(name), {}
    where: dict[str, Placements] = named_leaves(placements)
    for path, p in named_leaves(params).items():
        if quantises(p):
            used, end = where[path].in_use, p.dims.count("L") + p.contract
            in_axes, out_axes = (
                tuple(a for axes in dims for a in axes) for dims in (used[:end], used[end:])
            )
            in_axes = tuple(a for a in in_axes if a != "stage")
            shares = tuple(range(p.contract)) if recipe.scaling == "row" else None
            shares = (1, 2) if "E" in p.dims else shares  # experts [E, K, N] have one scale each
            plans[path] = WeightPlan(recipe, p.contract, in_axes, out_axes, shares)
    fields = {f.name: getattr(gather, f.name) for f in dataclasses.fields(GatherParams)}
    return LowPrecisionGather(**fields, plans=plans)


def _max_in_groups(values: dict[str, jax.Array], axes_of: dict[str, Axes]) -> dict[str, jax.Array]:
    """Takes each maximum over its axes, with one all-reduce for each set of axes."""
    groups: dict[Axes, list[str]] = {}
    for name, axes in axes_of.items():
        groups.setdefault(tuple(dict.fromkeys(axes)), []).append(name)
    result = dict(values)
    for axes, names in groups.items():
        if axes:
            flat = all_reduce_max(
                jnp.concatenate([values[name].reshape(-1) for name in names]), axes
            )
            start = 0
            for name in names:
                result[name] = flat[start : start + values[name].size].reshape(values[name].shape)
                start += values[name].size
    return result


def largest_along(x: jax.Array, dims: tuple[int, ...] | None) -> jax.Array:
    """Returns the largest magnitude along `dims` (None: of all), float32;
    kept as dimensions of size 1.

    NaN counts as infinity: XLA:CPU's maximum drops it, and integers have no NaN to carry it on.
    """
    magnitude = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))
    return jnp.max(magnitude, dims, keepdims=dims is not None).astype(jnp.float32)


def quantise(x: jax.Array, amax: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Returns `x` in a low-precision format and the float32 scale that takes it back.

    fp8 is scaled by the largest power of two that takes `amax` into its range. A zero gives a
    finite power; infinities and NaN stay so.
    """
    if dtype == "int8":
        # One division per row instead of one per element. A row of zeros stays zero.
        up = 127.0 / jnp.maximum(amax, 1e-30)
        return jnp.round(x.astype(jnp.float32) * up).astype(jnp.int8), amax / 127.0
    # The largest values are 1.75 * 2^8 = 448 and 1.75 * 2^15 = 57344.
    largest = {"float8_e4m3fn": 8, "float8_e5m2": 15}[dtype]
    exponent = (lax.bitcast_convert_type(amax / 1.75, jnp.int32) >> 23) - 127
    power = jnp.clip(largest - 1 - exponent, -126, 126)
    up, down = (
        lax.bitcast_convert_type((127 + sign * power) << 23, jnp.float32) for sign in (1, -1)
    )
    # A power of two is exact in bfloat16 too.
    return (x * up.astype(x.dtype)).astype(dtype), down


def _product(
    a: jax.Array, b: jax.Array, dims: tuple[int, int], dtype: Any, *scales: jax.Array
) -> jax.Array:
    """Contracts one dimension of each, accumulating in int32 or float32,
    and multiplies by the operands' scales.

    The product of fp8 operands is in `dtype`: powers of two scale it without rounding it again.
    """
    preferred = jnp.int32 if a.dtype == jnp.int8 else dtype
    product = lax.dot_general(
        a, b, (((dims[0],), (dims[1],)), ((), ())), preferred_element_type=preferred
    )
    if product.dtype == jnp.int32:
        product = product.astype(jnp.float32)
    for scale in scales:
        product = product * scale.astype(product.dtype)
    return product.astype(dtype)


_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _multiply(
    x_TD: jax.Array, w_DF: jax.Array, w_scale: jax.Array, carrier_DF: jax.Array, plan: WeightPlan
) -> jax.Array:
    """Multiplies activations by a quantised weight;
    `carrier_DF` takes the gradient of the weight."""
    return _multiply_fwd(x_TD, w_DF, w_scale, carrier_DF, plan)[0]


def _multiply_fwd(
    x_TD: jax.Array, w_DF: jax.Array, w_scale: jax.Array, carrier_DF: jax.Array, plan: WeightPlan
) -> tuple[jax.Array, _Saved]:
    with jax.named_scope(SCOPE):
        q_TD, x_scale = _quantise_activations(x_TD, plan.recipe.operand, plan, 1, plan.in_axes)
        y_TF = _product(q_TD, w_DF, (1, 0), x_TD.dtype, x_scale, w_scale)
    # The quantised activation is kept for the backward pass: half the bytes,
    # and one quantisation for two products.
    return y_TF, (q_TD, x_scale, w_DF, w_scale)


def _multiply_bwd(
    plan: WeightPlan, saved: _Saved, g_TF: jax.Array
) -> tuple[jax.Array, None, None, jax.Array]:
    q_TD, x_scale, w_DF, w_scale = saved
    dtype, recipe = g_TF.dtype, plan.recipe
    with jax.named_scope(SCOPE):
        if recipe.scaling == "tensor":
            q_TF, g_scale = quantise(g_TF, largest_along(g_TF, None), recipe.gradient)
            g_x_TD = _product(q_TF, w_DF, (1, 1), dtype, g_scale * w_scale)
            return g_x_TD, None, None, _product(q_TD, q_TF, (0, 0), dtype, g_scale * x_scale)
        # Scales along a contracted dimension cannot multiply the result. They multiply the gradient
        # before it is quantised, so that weight and activation are quantised once and serve two
        # products each.
        wide = jnp.float32 if recipe.gradient == "int8" else dtype
        scaled_TF = g_TF.astype(wide) * w_scale.astype(wide)
        q_TF, g_scale = _quantise_activations(scaled_TF, recipe.gradient, plan, 1, plan.out_axes)
        g_x_TD = _product(q_TF, w_DF, (1, 1), dtype, g_scale)
        scaled_TF = g_TF.astype(wide) * x_scale.astype(wide)
        q_TF, g_scale = _quantise_activations(scaled_TF, recipe.gradient, plan, 0, TOKEN_AXES)
        left, dim = q_TD, 0
        if recipe.operand == "int8":
            # A v5p multiplies int8 at the speed of bfloat16 where the rows of the left operand are
            # contracted: for 8192 x 4096 and 8192 x 14336 its compiler estimates 2.13 ms, and 1.07
            # ms with the left operand transposed in memory. Without the layout XLA relabels the
            # dimensions instead.
            left, dim = with_layout_constraint(q_TD.T, Layout(major_to_minor=(0, 1))), 1
        return g_x_TD, None, None, _product(left, q_TF, (dim, 0), dtype, g_scale)


_multiply.defvjp(_multiply_fwd, _multiply_bwd)


def quantises_experts(
    name: str, grouped: GroupedMatmul | None, machine: Machine, capacity: bool
) -> bool:
    """Whether the grouped matmuls of experts are in low precision;
    elsewhere they stay in the compute dtype.

    name: matmul precision of the run.
    grouped: its grouped matmul; None for a model without experts. capacity: whether experts are
    dispatched with a capacity, whose products are not grouped.
    """
    if name == "compute" or grouped is None or grouped.float8 is None or capacity:
        return False
    family = machine.chip.family if machine.chip else ""
    gains = machine.platform in grouped.float8.platforms and family not in grouped.float8.slower_on
    return gains and find_precision(name).operand == GROUPED_FORMAT


class Rows(NamedTuple):
    """Rows on their way to experts."""

    values: jax.Array
    """[R, D] in the compute dtype; the gradients are of these."""
    rounded: tuple[jax.Array, jax.Array] | None = None
    """The same numbers as float8 [R, D] and float32 scales [R, 1], where they are rounded so: what
    is sent, and what products in low precision read."""


def with_low_precision(
    grouped: GroupedMatmul,
) -> Callable[[jax.Array | Rows, Any, jax.Array], tuple[jax.Array, ...]]:
    """Returns the grouped matmul with products in low precision for weights
    that are gathered so."""
    products = grouped.float8
    assert products is not None

    def multiply(
        rows: jax.Array | Rows, weights: tuple[Any, ...], rows_E: jax.Array
    ) -> tuple[jax.Array, ...]:
        given = rows if isinstance(rows, Rows) else Rows(rows)
        if not isinstance(weights[0], LowPrecisionWeight):
            return grouped.multiply(given.values, weights, rows_E)
        values, scales, carriers = zip(
            *((w.values, w.scale, w.carrier) for w in weights), strict=True
        )
        return _multiply_groups(given, values, scales, carriers, rows_E, products)

    return multiply


GROUPED_FORMAT = "float8_e4m3fn"
"""Format of the operands of grouped matmuls, and of rows on their way to experts."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _multiply_groups(
    rows: Rows,
    weights: tuple[Any, ...],
    scales: Any,
    carriers: Any,
    rows_E: jax.Array,
    products: GroupedProducts,
) -> tuple[jax.Array, ...]:
    """Multiplies the rows of each expert [R, K] by its quantised weights, each [E, K, N]
    with a scale [E, 1, 1].

    Rounded rows are read as they are. carriers: take the gradients of the weights.
    """
    return _multiply_groups_fwd(rows, weights, scales, carriers, rows_E, products)[0]


def _multiply_groups_fwd(
    rows: Rows,
    weights: tuple[Any, ...],
    scales: Any,
    carriers: Any,
    rows_E: jax.Array,
    products: GroupedProducts,
) -> tuple[tuple[jax.Array, ...], Any]:
    with jax.named_scope(SCOPE):
        x = rows.values
        q_RK, x_scale = (
            quantise(x, largest_along(x, (1,)), GROUPED_FORMAT)
            if rows.rounded is None
            else rows.rounded
        )
        expert = (jnp.arange(x.shape[0])[:, None] >= jnp.cumsum(rows_E)).sum(1)
        scales_R1 = [scale[jnp.minimum(expert, rows_E.shape[0] - 1), 0] for scale in scales]
        results = tuple(
            products.rows(q_RK, w.swapaxes(1, 2), rows_E, x.dtype, x_scale * scale_R1, None)
            for w, scale_R1 in zip(weights, scales_R1, strict=True)
        )
    return results, (q_RK, x_scale, weights, scales_R1, rows_E)


def _multiply_groups_bwd(
    products: GroupedProducts, saved: Any, g: tuple[jax.Array, ...]
) -> tuple[Any, ...]:
    q_RK, x_scale, weights, scales_R1, rows_E = saved
    g_rows: Any = None
    g_weights = []
    with jax.named_scope(SCOPE):
        for w, scale_R1, g_RN in zip(weights, scales_R1, g, strict=True):
            q_RN, g_scale = quantise(g_RN, largest_along(g_RN, (1,)), GROUPED_FORMAT)
            g_rows = products.rows(q_RN, w, rows_E, g_RN.dtype, g_scale * scale_R1, g_rows)
            # The scales of rows lie along the contracted dimension: they multiply the
            # gradient before it is quantised.
            scaled = g_RN * x_scale.astype(g_RN.dtype)
            q_RN, g_scale = quantise(scaled, largest_along(scaled, (0,)), GROUPED_FORMAT)
            g_weights.append(products.groups(q_RK, q_RN, rows_E, g_RN.dtype, g_scale))
    return Rows(g_rows), None, None, tuple(g_weights), None


_multiply_groups.defvjp(_multiply_groups_fwd, _multiply_groups_bwd)


def _quantise_activations(
    x: jax.Array, dtype: str, plan: WeightPlan, dim: int, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """Quantises activations or gradients, with one scale for all or one
    for each index other than along `dim`.

    axes: mesh axes that split `dim`.
    """
    if plan.recipe.scaling == "tensor":
        return quantise(x, largest_along(x, None), dtype)
    amax = largest_along(x, (dim,))
    return quantise(x, all_reduce_max(amax, axes) if dtype == "int8" else amax, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _multiply_in_blocks(x_TD: jax.Array, w_DF: jax.Array, plan: WeightPlan) -> jax.Array:
    """Multiplies activations by a weight, both quantised
    in MX blocks along the contracted dimension."""
    with jax.named_scope(SCOPE):
        return _block_product(x_TD, w_DF.T, plan.recipe, "operand", "operand")


def _multiply_in_blocks_bwd(
    plan: WeightPlan, saved: tuple[jax.Array, jax.Array], g_TF: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_TD, w_DF = saved
    with jax.named_scope(SCOPE):
        g_x_TD = _block_product(g_TF, w_DF, plan.recipe, "gradient", "operand")
        return g_x_TD, _block_product(x_TD.T, g_TF.T, plan.recipe, "operand", "gradient")


_multiply_in_blocks.defvjp(
    lambda x, w, plan: (_multiply_in_blocks(x, w, plan), (x, w)), _multiply_in_blocks_bwd
)


def _block_product(
    a_TD: jax.Array, b_FD: jax.Array, recipe: MatmulPrecision, *formats: str
) -> jax.Array:
    """Returns a b^T of operands that are quantised in blocks along their last dimension.

    formats: field of the recipe with the format of each. The last block is padded with zeros.
    """

    def quantised(x_TD: jax.Array, field: str) -> tuple[jax.Array, jax.Array]:
        padded_TD = jnp.pad(x_TD, ((0, 0), (0, -x_TD.shape[1] % recipe.block)))
        blocks = padded_TD.reshape(x_TD.shape[0], -1, recipe.block)
        values, scale = quantise(blocks, largest_along(blocks, (2,)), getattr(recipe, field))
        return values.reshape(1, *padded_TD.shape), scale[..., 0].astype(jnp.float8_e8m0fnu)[None]

    (a, a_scale), (b, b_scale) = (
        quantised(x, field) for x, field in zip((a_TD, b_FD), formats, strict=True)
    )
    return jax.nn.scaled_matmul(a, b, a_scale, b_scale, preferred_element_type=a_TD.dtype)[0]
