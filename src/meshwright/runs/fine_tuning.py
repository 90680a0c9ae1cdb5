"""Checks of a run's fine-tuning, before anything is traced."""

from meshwright.config import MeshShape, Run
from meshwright.errors import ConfigError


def check_fine_tuning(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError for a number that is out of range, and for what does not go together."""
    tuning, training = run.finetune, run.training
    lora, preferences = tuning.method == "lora", tuning.objective == "preferences"
    asked_lora = "--finetune.method lora with"
    for asked, truth, right, fix in (
        (f"adapters of rank {tuning.rank}", "a rank is at least 1", tuning.rank >= 1, "--finetune.rank 16"),
        (f"alpha {tuning.alpha}", "it scales the adapters, above 0", tuning.alpha > 0, "--finetune.alpha 32"),
        (f"beta {tuning.beta}", "it weighs the reference, above 0", tuning.beta > 0, "--finetune.beta 0.1"),
        ("adapters of no matrix", "lora trains adapters alone", bool(tuning.targets), "--finetune.targets all"),
        (
            f"a base in {tuning.base} with method {tuning.method}",
            "what is trained has a gradient, and a gradient of quantised values is none: the frozen base is quantised",
            lora or tuning.base == "compute", "--finetune.method lora",
        ),
        (
            f"the adapter {tuning.adapter} with method {tuning.method}", "an adapter is a start for adapters",
            lora or tuning.adapter is None, "--finetune.method lora",
        ),
        (
            f"{asked_lora} --training.matmul-precision {training.matmul_precision}",
            "the recipes quantise weights and their gradients, and the weights beside adapters are frozen",
            not lora or training.matmul_precision == "compute",
            "--training.matmul-precision compute; --finetune.base int8 or nf4 saves memory",
        ),
        (
            f"{asked_lora} --training.stage-saves {training.stage_saves}",
            f"a stage would keep a copy of its frozen weights with each of up to {shape.stage} microbatches in flight",
            not lora or training.stage_saves != "layers" or shape.stage == 1, "--training.stage-saves input",
        ),
        (
            f"preferences on mesh {shape}",
            f"the reference is a second forward pass of each microbatch, which the schedule of {shape.stage} stages "
            "does not have",
            not preferences or shape.stage == 1, f"fsdp={shape.stage * shape.fsdp} in the place of stage={shape.stage}",
        ),
    ):  # fmt: skip
        if not right:
            raise ConfigError(asked, truth, fix)
