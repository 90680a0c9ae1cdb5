"""MaxText's own `train_compile`, with its compiled program written to a folder.

    MAXTEXT_VENV/bin/python bench/maxtext_compile.py FOLDER [--schedule] [key=value ...]

Runs in MaxText's environment (bench/README.md) and imports nothing of meshwright. FOLDER receives `program.hlo.gz`
and `facts.json`: bytes, seconds, versions and the settings that MaxText resolved. The program is what
`maxtext.trainers.pre_train.train_compile` compiles, with MaxText's base.yml and the arguments given.

The bodies of Pallas kernels are emptied before: XLA takes a kernel as one instruction whose name, shapes and blocks are
all that a reading uses, and code for attention in blocks of 2,048 takes libtpu longer than all else.

With `--schedule` it ends when the program is scheduled and its memory is assigned, before code is generated, which
takes nine tenths of the time. What it then lacks are the compiler's cycles of each matmul, which come with the code.
"""

import base64
import gzip
import importlib.metadata
import io
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hlo_lines import with_elements

_PACKAGES = ("maxtext", "jax", "jaxlib", "libtpu", "flax", "tokamax")
_SETTINGS = (
    "remat_policy", "attention", "scan_layers", "dtype", "weight_dtype", "grad_dtype", "opt_type", "compile_xla_flags",
    "base_num_decoder_layers", "base_emb_dim", "base_mlp_dim", "vocab_size", "global_batch_size_to_train_on",
    "max_target_length", "sparse_matmul", "megablox", "capacity_factor", "use_tokamax_gmm", "sa_block_q",
    "gradient_accumulation_steps", "num_vocab_tiling", "mu_dtype",
)  # fmt: skip


def empty_kernels(lowered: Any) -> int:
    """Empties the body of every Pallas kernel of a lowered program; returns how many there are.

    Grid, windows of the operands, names and shapes stay. Mosaic checks the kernel's debug locations against its body, so
    they are taken out.
    """
    from jaxlib.mlir import ir

    module = lowered.compiler_ir("stablehlo")
    emptied = 0

    def visit(operation: Any) -> Any:
        nonlocal emptied
        if operation.name != "stablehlo.custom_call":
            return ir.WalkResult.ADVANCE
        if ir.StringAttr(operation.attributes["call_target_name"]).value != "tpu_custom_call":
            return ir.WalkResult.ADVANCE
        config = json.loads(ir.StringAttr(operation.attributes["backend_config"]).value)
        kernel = config["custom_call_config"]
        kernel.pop("debug_locations", None)
        body = _without_body(base64.b64decode(kernel["body"]))
        kernel["body"] = base64.b64encode(body).decode()
        with module.context:
            operation.attributes["backend_config"] = ir.StringAttr.get(json.dumps(config))
        emptied += 1
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return emptied


def _without_body(bytecode: bytes) -> bytes:
    """Returns a Mosaic module whose kernel, its first function, returns at once."""
    from jaxlib.mlir import ir

    context = ir.Context()
    context.allow_unregistered_dialects = True
    with context:
        module = ir.Module.parse(bytecode)
        kernel = next(iter(module.body.operations))
        work = list(kernel.regions[0].blocks[0].operations)[:-1]
        for operation in reversed(work):
            operation.operation.erase()
        written = io.BytesIO()
        module.operation.write_bytecode(written)
    return written.getvalue()


def end_when_scheduled(folder: Path, facts: dict[str, object]) -> None:
    """Waits until XLA has dumped the scheduled program, writes it to the folder and ends the process."""
    program = "*.after_optimizations_after_buffer_assignment.txt"
    report = "*.after_optimizations-memory-usage-report.txt"  # comes after the program
    dumps = folder / "dump"
    while not (list(dumps.glob(program)) and list(dumps.glob(report))):
        time.sleep(0.5)
    time.sleep(5)  # the files are being written
    with gzip.open(folder / "program.hlo.gz", "wt", encoding="utf-8") as out:
        out.write(with_elements(next(dumps.glob(program)).read_text(encoding="utf-8")))
    facts["scheduled_only"] = True
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(dumps)
    os._exit(0)


def main() -> None:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, object] = {"arguments": words}
    facts["versions"] = {name: importlib.metadata.version(name) for name in _PACKAGES}
    if words[:1] == ["--schedule"]:
        words = words[1:]
        dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text"
        os.environ["XLA_FLAGS"] = f"{dump} --xla_dump_hlo_module_re=train_step"
        threading.Thread(target=end_when_scheduled, args=(folder, facts), daemon=True).start()
    import jax

    compile_before = jax.stages.Lowered.compile

    def compile_and_write(self, *words, **more):  # type: ignore[no-untyped-def]
        facts["emptied_kernels"] = empty_kernels(self)
        began = time.perf_counter()
        compiled = compile_before(self, *words, **more)
        stats = compiled.memory_analysis()
        facts.update(
            compile_seconds=time.perf_counter() - began, compiler_options=more.get("compiler_options") or {},
            peak=stats.peak_memory_in_bytes, arguments_bytes=stats.argument_size_in_bytes,
            temporary=stats.temp_size_in_bytes, host=stats.host_temp_size_in_bytes,
            output=stats.output_size_in_bytes, alias=stats.alias_size_in_bytes,
            cost_flops=(compiled.cost_analysis() or {}).get("flops"),
        )  # fmt: skip
        with gzip.open(folder / "program.hlo.gz", "wt", encoding="utf-8") as out:
            out.write(compiled.as_text())
        return compiled

    jax.stages.Lowered.compile = compile_and_write  # type: ignore[method-assign]
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train_compile

    initialize_before = pyconfig.initialize

    def initialize(*words, **more):  # type: ignore[no-untyped-def]
        config = initialize_before(*words, **more)
        facts["settings"] = {name: str(getattr(config, name, None)) for name in _SETTINGS}
        return config

    pyconfig.initialize = initialize
    import maxtext

    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    train_compile.main(["train_compile", base, "compile_topology_num_slices=1", *words])
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
