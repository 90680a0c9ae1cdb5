"""Runs that fine-tune: their defaults, and the checks of what they ask for before anything is traced."""

import dataclasses

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.fine_tuning import FineTune, Method, Objective
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.storage.paths import path_of

_RATES: dict[tuple[str, bool], float] = {
    ("lora", False): 2e-4, ("full", False): 2e-5, ("lora", True): 5e-6, ("full", True): 5e-7,
}  # fmt: skip
"""Peak learning rates by method, and whether preferences are learned: QLoRA's for adapters, TRL's for DPO."""


def source_run(source: str) -> Run:
    """Returns the Run that starts from the weights of a source: hf:PATH, the output folder of a run, or a recipe."""
    folder = path_of(source)
    if not (folder / "run.json").is_file():
        return find_recipe(source)
    run = run_in_folder(folder)
    data = dataclasses.replace(run.data, tokenizer=str(folder / "tokenizer.json"))
    return dataclasses.replace(run, init_from=source, data=data, finetune=FineTune(), name=f"{folder.name}-tuned")


def tuned(run: Run, method: Method, objective: Objective) -> Run:
    """Returns a run with the defaults of fine-tuning: learning rate of the method, no weight decay, no sample."""
    optimizer = dataclasses.replace(
        run.optimizer, learning_rate=_RATES[method, objective == "preferences"], weight_decay=0.0, warmup_steps=10,
        beta2=0.999,
    )  # fmt: skip
    data = dataclasses.replace(run.data, sample=0)
    tuning = dataclasses.replace(run.finetune, method=method, objective=objective)
    return dataclasses.replace(run, optimizer=optimizer, data=data, finetune=tuning)


def check_start(run: Run) -> None:
    """Raises ConfigError where a run that fine-tunes has no weights to start from."""
    if run.init_from is None:
        raise ConfigError(
            f"fine-tuning {run.name}", "the recipe draws random weights: there is nothing to tune",
            "--init-from hf:PATH or the output folder of a run; or hf:PATH in the place of the recipe",
        )  # fmt: skip


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
