"""Megatron's arguments in a `torch_dist` checkpoint: those that change what its tensors compute.

Megatron-LM writes its command line into `common.pt`, a file of `torch.save`. The tensors do not tell whether rotary pairs
are interleaved or a norm adds one to its scale; the arguments do. They are read as data: nothing is imported or called.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.documents import SMALL, check_inside
from meshwright.errors import WeightsError, by_class, reason_of
from meshwright.hugging_face.pickled_data import Call, read_pickled

ARGUMENTS = "common.pt"
_DESCRIPTION = "data.pkl"
_SAME_IN_ALL: dict[str, Any] = {
    "rotary_interleaved": False,
    "apply_layernorm_1p": False,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "apply_residual_connection_post_layernorm": False,
    "moe_router_pre_softmax": False,
}
"""Arguments that say how tensors of these names are computed, and what Hugging Face's models compute."""
_OF_CONFIG = {
    "num_attention_heads": ("heads", "num_attention_heads"),
    "rotary_base": ("rope_theta", "rope_theta"),
    "norm_epsilon": ("norm_epsilon", "rms_norm_eps"),
    "moe_router_topk": ("experts_per_token", "num_experts_per_tok"),
}
"""Argument -> field of the model, and its name in config.json."""
_FIX = "a Hugging Face folder, written by Megatron Bridge (AutoBridge.export_ckpt)"


class _EveryName:
    """Names that arguments may have: objects of any program, which stay names."""

    def __contains__(self, name: object) -> bool:
        return True


def read_arguments(folder: Path) -> Mapping[str, Any] | None:
    """Returns Megatron's arguments by name; None for a checkpoint without them, as other trainers write it.

    Raises WeightsError for a file that cannot be read.
    """
    file = folder / ARGUMENTS
    if not file.is_file():
        return None
    try:
        check_inside(folder, [file])
        with zipfile.ZipFile(file) as archive:
            found = [i for i in archive.infolist() if i.filename.endswith(f"/{_DESCRIPTION}")]
            if len(found) != 1 or found[0].file_size > SMALL:
                raise ValueError(f"it has no {_DESCRIPTION} of at most {SMALL:,} bytes")
            content = read_pickled(archive.read(found[0]), _EveryName())
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        refusal = WeightsError(f"reading {file}", reason_of(error), _FIX)
        raise by_class(error, refusal) from error
    arguments = content.get("args") if isinstance(content, dict) else None
    if not isinstance(arguments, Call) or not isinstance(arguments.state, dict):
        return None
    return arguments.state


def check_arguments(folder: Path, model: Any) -> bool:
    """Whether a checkpoint has the arguments of Megatron, which then agree with config.json.

    Raises WeightsError for an argument with which Megatron computes another function of the tensors.
    """
    arguments = read_arguments(folder)
    if arguments is None:
        return False
    asked = f"converting {folder}"
    for name, expected in _SAME_IN_ALL.items():
        value = arguments.get(name, expected)
        if value != expected:
            truth = (
                f"Megatron trained it with {name} = {value!r} ({ARGUMENTS}); Hugging Face's model of "
                f"these names computes {expected!r}"
            )
            raise WeightsError(asked, truth, _FIX)
    for name, (field, theirs) in _OF_CONFIG.items():
        expected = getattr(model, field, None)
        value = arguments.get(name, expected)
        if expected is not None and value != expected:
            truth = f"Megatron trained it with {name} = {value!r} ({ARGUMENTS}); config.json has {expected!r}"
            raise WeightsError(asked, truth, f"the config.json of this model: {theirs} {value!r}")
    scaled = getattr(model, "rope_scaling", None) is not None
    if arguments.get("use_rope_scaling", scaled) != scaled:
        truth = (
            f"Megatron trained it with use_rope_scaling = {not scaled} ({ARGUMENTS}), and config.json "
            f"has {'a' if scaled else 'no'} rope_scaling"
        )
        raise WeightsError(asked, truth, "the config.json of this model, with its rope_scaling")
    return True
