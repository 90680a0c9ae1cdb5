"""The ledger of each program equals counts made by hand: on the CPU here, and in texts of other compilers."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import AXES, OFFLOADED, PROGRAMS, Counts, F, T

import meshwright as mw
from xlacensus.collective_lints import MIN_SENT_BYTES
from xlacensus.errors import CensusError
from xlacensus.hlo.collectives import axes_of_groups, axes_of_pairs, expand
from xlacensus.hlo.ledger import LedgerEntry, read_ledger, traffic, unread_collectives
from xlacensus.hlo.parser import parse_module
from xlacensus.jaxprs import JaxprCollective, read_jaxpr_collectives
from xlacensus.lints import lint_host

TEXTS = Path(__file__).parent / "texts"
TPUS = ("v5p", "v5e", "tpu7x")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(tuple(AXES.values())), tuple(AXES))


def counts(entries: list[LedgerEntry]) -> Counts:
    return {(row["kind"], row["axes"]): (row["count"], row["total"]) for row in traffic(entries)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_counts_are_those_made_by_hand(name: str, mesh: Mesh) -> None:
    program = PROGRAMS[name]
    function, arguments = program.build(mesh)
    census = mw.census(function, *arguments)
    assert counts(list(census.ledger)) == program.sends
    assert all(e.exact for e in census.ledger) == program.exact
    assert any(e.conditional for e in census.ledger) == program.branch
    assert all(
        e.line.startswith(("programs.py:", "collectives.py:", "hierarchical.py:"))
        for e in census.ledger
    )
    assert not [f for f in census.findings if f.kind == "unexpected"]


def test_an_inserted_collective_is_found_above_the_floor(mesh: Mesh) -> None:
    """Both contract over `tensor`, so XLA has to sum; what a device sends is the whole of its [rows / 4, 32]."""
    kinds = {}
    for rows in (16, 64):
        x, w = (
            jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
            for shape, spec in (((rows, 32), P(F, T)), ((32, 32), P(T)))
        )
        product = jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(mesh, P(F)))
        census = mw.census(product, x, w)
        (entry,) = census.ledger
        kinds[entry.sent] = [f.kind for f in census.findings]
    below, above = sorted(kinds)
    assert below < MIN_SENT_BYTES <= above
    assert "unexpected" not in kinds[below] and "unexpected" in kinds[above]


# Where a chip's compiler does something else with the same program: TPUs cast the operands of a matrix product to
# bfloat16 before they gather them, and make small reduce-scatters all-reduces, outside the loop if they can; GPUs
# gather two arrays in one collective.
OTHERWISE: dict[str, Counts] = {
    "fsdp": {("all-gather", F): (1, 256)},
    "fsdp gradient": {("all-gather", F): (1, 256), ("all-reduce", F): (1, 512)},
    "megatron with the sequence": {("all-gather", T): (2, 512), ("all-reduce", T): (2, 1024)},
    "fsdp x tensor": {("all-gather", F): (2, 1024), ("all-reduce", T): (1, 128)},
    "accumulation": {
        ("all-gather", F): (3, 768),
        ("all-reduce", F): (1, 512),
        ("all-reduce", T): (1, 128),
    },
    "large layers": {("all-gather", F): (3, 3 * 2**19), ("reduce-scatter", F): (3, 3 * 2**20)},
}
ON_GPU: dict[str, Counts] = {
    "fsdp x tensor": {("all-gather", F): (1, 2048), ("all-reduce", T): (1, 128)},
    "accumulation": {
        ("all-gather", F): (3, 1536),
        ("reduce-scatter", F): (3, 1536),
        ("all-reduce", T): (1, 128),
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("target", [*TPUS, "h100"])
def test_texts_of_other_compilers(target: str, name: str) -> None:
    text = (TEXTS / target / f"{name.replace(' ', '-')}.hlo").read_text()
    entries = read_ledger(parse_module(text), AXES)
    otherwise = OTHERWISE if target in TPUS else ON_GPU
    assert counts(entries) == otherwise.get(name, PROGRAMS[name].sends)


@pytest.mark.parametrize(
    ("target", "name", "kind", "behind"),
    [
        ("v5e", "large layers", "all-gather", False),
        ("v5p", "ring", "collective-permute", True),
        ("tpu7x", "large layers", "all-gather", True),
        ("tpu7x", "large layers", "reduce-scatter", True),
        ("h100", "large layers", "reduce-scatter", True),
        ("h100", "ring", "collective-permute", True),
    ],
)
def test_what_runs_between_start_and_done(target: str, name: str, kind: str, behind: bool) -> None:
    """Start and done pairs, calls on another thread of the chip, and asynchronous computations."""
    text = (TEXTS / target / f"{name.replace(' ', '-')}.hlo").read_text()
    entries = [e for e in read_ledger(parse_module(text), AXES) if e.kind == kind]
    assert any(entry.asynchronous for entry in entries) == behind
    assert any(entry.overlapped for entry in entries) == behind


GATHER = """\
HloModule m, num_partitions=8

%fused.1 (p: f32[4,8]) -> (f32[4,8], f32[16,8]) {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %all-gather.1 = f32[16,8]{1,0} all-gather(%p), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0), \
dimensions={0}, frontend_attributes={chain_id="0"}
}

%fused.2 (p: f32[4,8]) -> f32[16,8] {
  %p.2 = f32[4,8]{1,0} parameter(0)
  ROOT %all-gather.2 = f32[16,8]{1,0} all-gather(%p.2), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0), \
dimensions={0}, frontend_attributes={chain_id="0"}
}

%all-reduce-scatter.3 (p.3: f32[16,8]) -> f32[4,8] {
  %p.3 = f32[16,8]{1,0} parameter(0)
  %all-reduce.3 = f32[16,8]{1,0} all-reduce(%p.3), channel_id=6, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %slice.3 = f32[4,8]{1,0} dynamic-slice(%all-reduce.3, %zero, %zero), dynamic_slice_sizes={4,8}
}

%wrapped (q: f32[4,8]) -> f32[4,8] {
  %q = f32[4,8]{1,0} parameter(0)
  ROOT %permute = f32[4,8]{1,0} collective-permute(%q), channel_id=7, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
}

ENTRY %main (x: f32[4,8]) -> (f32[4,8], f32[4,8]) {
  %x = f32[4,8]{1,0} parameter(0), metadata={op_name="x"}
  %async-collective-start = (f32[4,8]{1,0}, f32[16,8]{1,0}) fusion(%x), kind=kCustom, calls=%fused.1
  %piece = f32[4,8]{1,0} get-tuple-element(%async-collective-start), index=0
  %dot.1 = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %fusion.2 = f32[16,8]{1,0} fusion(%piece), kind=kOutput, calls=%fused.2
  %async-collective-done = f32[16,8]{1,0} fusion(%fusion.2), kind=kCustom, calls=%done
  %scattered = f32[4,8]{1,0} fusion(%async-collective-done), kind=kCustom, calls=%all-reduce-scatter.3
  %start = ((f32[4,8]{1,0}), f32[4,8]{1,0}) async-start(%scattered), calls=%wrapped
  %sin = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%sine
  %finish = f32[4,8]{1,0} async-done(%start), calls=%wrapped
  ROOT %tuple = (f32[4,8]{1,0}, f32[4,8]{1,0}) tuple(%scattered, %finish)
}
"""


def test_forms_that_only_some_chips_print() -> None:
    """A gather in pieces counts once; an all-reduce with a slice in one fusion is a reduce-scatter; wrapped pairs."""
    gathered, scattered, passed = read_ledger(parse_module(GATHER), AXES)
    assert (gathered.kind, gathered.axes, gathered.count, gathered.payload) == (
        "all-gather",
        (F,),
        1,
        512,
    )
    assert gathered.asynchronous and gathered.overlapped == ("dot.1", "fusion.2")
    assert (scattered.kind, scattered.axes, scattered.payload) == ("reduce-scatter", (F,), 512)
    assert (passed.kind, passed.axes, passed.payload) == ("collective-permute", (T,), 128)
    assert passed.asynchronous and passed.overlapped == ("sin",)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", ("fsdp",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("{}", ("fsdp", "tensor")),
        ("[2,4]<=[4,2]T(1,0)", ("fsdp",)),
        ("[4,2]<=[8]", ("tensor",)),
        ("[1,8]<=[8]", ("fsdp", "tensor")),
        ("mesh['a'=4,'b'=2] {'b'}", ("tensor",)),
        ("mesh['a'=4,'one'=1,'b'=2] {'a','b'}", ("fsdp", "tensor")),
        ("mesh['all'=8] {'all':(1)4}", ("fsdp",)),
        ("mesh['all'=8] {'all':(4)2}", ("tensor",)),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("{{0,3},{1,2},{4,7},{5,6}}", None),
    ],
)
def test_the_three_spellings_of_groups(text: str, axes: tuple[str, ...] | None) -> None:
    assert axes_of_groups(expand(text, 8), AXES) == axes


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_groups_of_any_axes_are_found_again(degrees: list[int], data: st.DataObject) -> None:
    mesh = {f"axis{i}": n for i, n in enumerate(degrees)}
    chosen = data.draw(st.lists(st.sampled_from(sorted(mesh)), unique=True))
    text = f"mesh[{','.join(f"'{a}'={n}" for a, n in mesh.items())}] {{{','.join(f"'{a}'" for a in chosen)}}}"
    nontrivial = tuple(a for a in mesh if a in chosen and mesh[a] > 1)
    assert axes_of_groups(expand(text, 0), mesh) == nontrivial


def test_a_permutation_names_the_axes_it_moves_along() -> None:
    assert axes_of_pairs(((0, 2), (2, 4)), AXES) == ("fsdp",)
    assert axes_of_pairs(((0, 3),), AXES) == ("fsdp", "tensor")
    assert axes_of_pairs(((0, 9),), AXES) is None


@pytest.mark.parametrize("text", ["", "module {", "HloModule m\n\n%a (x: f32[]) -> f32[] {\n}\n"])
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(CensusError):
        parse_module(text)


def test_what_slices_send_each_other() -> None:
    """Two slices of eight v5e: a sum of 64 x 128 words is summed over 2 inside, half of it crosses, then gathered."""
    module = parse_module((Path(__file__).parent / "texts" / "slices" / "v5e.hlo").read_text())
    entries = read_ledger(module, {"data": 4, "fsdp": 4})
    found = {(e.kind, e.axes_label): (e.count, e.payload) for e in entries}
    whole = 64 * 128 * 4
    # This chip scatters so little by summing it and cutting.
    assert found == {
        ("all-reduce", "data within 2"): (1, whole),
        ("all-reduce", "slices"): (1, whole // 2),
        ("all-gather", "data within 2"): (1, whole),
    }
    assert not list(lint_host(module))


def test_collectives_that_a_v5p_offloads_to_its_sparsecores() -> None:
    """`custom-call-start` without operands, an update that passes them, a done: one reduce-scatter."""
    module = parse_module((TEXTS / "sparsecore" / "v5p.hlo").read_text())
    entries = read_ledger(module, AXES)
    assert counts(entries) == OFFLOADED.sends
    assert unread_collectives(module) == []
    offloaded = next(e for e in entries if e.kind == "reduce-scatter")
    assert offloaded.asynchronous and offloaded.overlapped == ("fusion.22",)
    assert offloaded.line == "programs.py:58"


UPDATE = """\
HloModule m, num_partitions=8

%called (p: f32[4,8]) -> f32[16,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %all-gather.1 = f32[16,8]{1,0} all-gather(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
}

ENTRY %main (x: f32[4,8]) -> (f32[16,8], f32[4,4]) {
  %x = f32[4,8]{1,0} parameter(0)
  %start = ((), (), (s32[1])) START
  %before = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%sine
  %update = ((f32[4,8]), f32[16,8]) call-update(%start, %before)
  %during = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %done = f32[16,8]{1,0} call-done(%update)
  %after = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%sine
  ROOT %tuple = (f32[16,8], f32[4,4]) tuple(%done, %during)
}
"""


@pytest.mark.parametrize(
    "start",
    ["call-start(), to_apply=%called", "custom-call-start(), called_computations={%called}"],
)
def test_a_transfer_begins_with_its_operands(start: str) -> None:
    """Neither what runs before the operands exist nor what runs after the done overlaps."""
    (gathered,) = read_ledger(parse_module(UPDATE.replace("START", start)), AXES)
    assert (gathered.axes, gathered.payload, gathered.asynchronous) == ((F,), 512, True)
    assert gathered.overlapped == ("during",)


@pytest.mark.parametrize(
    "line",
    [
        "%unknown = f32[4,8]{1,0} mystery(%x), replica_groups={{0,1},{2,3}}",
        "%unknown = f32[4,8]{1,0} ring-exchange(%x), source_target_pairs={{0,1},{1,0}}",
        '%unknown = f32[4,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"has_communication":true}}',
        '%unknown = f32[4,8]{1,0} custom-call(%x), custom_call_target="__nccl_all_to_all"',
        "%unknown = f32[4,8]{1,0} NEW all-gather-start(%x), replica_groups={{0,1}}",
    ],
)
def test_a_collective_that_is_not_understood_is_reported(line: str) -> None:
    """The ledger is checked against all of the program's text; what it lacks is named."""
    text = UPDATE.replace("START", "call-start(), to_apply=%called")
    assert unread_collectives(parse_module(text)) == []
    broken = parse_module(text.replace("%after =", f"{line}\n  %after ="))
    (unread,) = unread_collectives(broken)
    assert "unknown" in unread


def test_a_collective_that_nothing_runs_is_reported() -> None:
    text = UPDATE.replace("START", "call-start(), runs=%called")
    module = parse_module(text)
    assert read_ledger(module, AXES) == []
    assert unread_collectives(module) == ["all-gather.1 (all-gather) in called"]


def test_a_census_with_an_incomplete_ledger_shows_it() -> None:
    census = mw.census(lambda x: x + 1, np.ones(3, np.float32))
    assert census.unread == () and "Incomplete" not in str(census)
    broken = dataclasses.replace(census, unread=("mystery.1 (mystery) in main",))
    shown = " ".join(str(broken).split())
    assert "Incomplete ledger" in shown and "mystery.1 (mystery) in main" in shown
    assert "mystery.1 (mystery) in main" in broken._repr_html_()
    assert broken.to_json()["unread"] == ["mystery.1 (mystery) in main"]


RAGGED = """\
HloModule m, num_partitions=8

ENTRY %main (x: f32[16,8], y: f32[64,8], o: s32[4]) -> f32[64,8] {
  %x = f32[16,8]{1,0} parameter(0)
  %y = f32[64,8]{1,0} parameter(1)
  %o = s32[4]{0} parameter(2)
  ROOT %r = f32[64,8]{1,0} ragged-all-to-all(%x, %y, %o, %o, %o, %o), replica_groups={{0,2,4,6},{1,3,5,7}}
}
"""


def test_a_ragged_exchange_counts_its_rows_alone() -> None:
    """Neither the output buffer nor offsets and sizes are sent: 16 * 8 rows of 4 bytes."""
    (entry,) = read_ledger(parse_module(RAGGED), AXES)
    assert (entry.kind, entry.axes, entry.payload) == ("ragged-all-to-all", (F,), 512)
    assert entry.sent == 512 * 3 / 4
    (entry,) = read_ledger(parse_module(RAGGED), AXES, sent_rows={F: 5})
    assert entry.payload == 5 * 8 * 4


@pytest.mark.parametrize(
    ("groups", "axes"),
    [(None, F), ([[0, 1], [2, 3]], f"{F} within 2"), ([[0, 2], [1, 3]], f"{F} between 2")],
)
def test_a_ragged_exchange_is_expected_with_the_same_payload(
    mesh: Mesh, groups: list[list[int]] | None, axes: str
) -> None:
    def exchange(x: jax.Array, y: jax.Array, o: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(x, y, o, o, o, o, axis_name=F, axis_index_groups=groups)

    body = jax.shard_map(
        exchange, mesh=mesh, in_specs=(P(F), P(F), P()), out_specs=P(F), check_vma=False
    )
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((64, 8), "float32"), ((256, 8), "float32"))
    ]
    jaxpr = jax.make_jaxpr(body)(
        *shapes, jax.ShapeDtypeStruct((len(groups[0]) if groups else 4,), "int32")
    )
    (found,) = read_jaxpr_collectives(jaxpr, AXES)
    assert found == JaxprCollective("ragged-all-to-all", (axes,), 1, 512, found.lines)
    assert len(found.lines) == 1 and next(iter(found.lines)).startswith("test_ledger.py:")
