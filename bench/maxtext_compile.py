"""MaxText's own `train_compile`, with its compiled program written to a folder.

    MAXTEXT_VENV/bin/python bench/maxtext_compile.py FOLDER [key=value ...]

Runs in MaxText's environment (bench/README.md) and imports nothing of meshwright. FOLDER receives `program.hlo.gz`
and `facts.json`: bytes, seconds, versions and the settings that MaxText resolved. The program is what
`maxtext.trainers.pre_train.train_compile` compiles, with MaxText's base.yml and the arguments given.
"""

import gzip
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path

_PACKAGES = ("maxtext", "jax", "jaxlib", "libtpu", "flax", "tokamax")
_SETTINGS = (
    "remat_policy", "attention", "scan_layers", "dtype", "weight_dtype", "grad_dtype", "opt_type", "compile_xla_flags",
    "base_num_decoder_layers", "base_emb_dim", "base_mlp_dim", "vocab_size", "global_batch_size_to_train_on",
    "max_target_length", "sparse_matmul", "megablox", "capacity_factor", "use_tokamax_gmm", "sa_block_q",
    "gradient_accumulation_steps", "num_vocab_tiling", "mu_dtype",
)  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    import jax

    facts: dict[str, object] = {"arguments": sys.argv[2:]}
    compile_before = jax.stages.Lowered.compile

    def compile_and_write(self, *words, **more):  # type: ignore[no-untyped-def]
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
    train_compile.main(["train_compile", base, "compile_topology_num_slices=1", *sys.argv[2:]])
    facts["versions"] = {name: importlib.metadata.version(name) for name in _PACKAGES}
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
