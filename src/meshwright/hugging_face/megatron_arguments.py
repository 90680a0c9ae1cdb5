"""Megatron's arguments in a `torch_dist` checkpoint: those that change what its tensors compute.

Megatron-LM writes its command line into `common.pt`, a file of `torch.save`. The tensors do not
tell whether rotary pairs are interleaved or a norm adds one to its scale; the arguments do. They
are read as data: nothing is imported or called.
"""

import dataclasses
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.documents import SMALL, check_inside, open_bytes
from meshwright.errors import WeightsError, by_class, reason_of
from meshwright.hugging_face.pickled_data import Call, Named, read_pickled
from meshwright.hugging_face.torch_checkpoints import ZIP_ERRORS, read_member
from meshwright.models.blocks.rotary import RopeScaling

ARGUMENTS = "common.pt"
_DESCRIPTION = "data.pkl"
_SAME_IN_ALL: dict[str, Any] = {
    "rotary_interleaved": False,
    "apply_layernorm_1p": False,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "no_rope_freq": None,
    "qk_l2_norm": False,
    "apply_residual_connection_post_layernorm": False,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
}
"""Arguments that say how tensors of these names are computed,
and what Hugging Face's models compute."""
_OF_CONFIG = {
    "num_attention_heads": ("heads", "num_attention_heads"),
    "rotary_base": ("rope_theta", "rope_theta"),
    "norm_epsilon": ("norm_epsilon", "rms_norm_eps"),
    "moe_router_topk": ("experts_per_token", "num_experts_per_tok"),
}
"""Argument -> field of the model, and its name in config.json."""
_POSITIONS = "position_embedding_type"
_INTERPOLATION = "rotary_seq_len_interpolation_factor"
_SCALED = "use_rope_scaling"
_FACTOR = "rope_scaling_factor"
_DEFAULT_FACTOR = 8.0
"""Factor where Megatron's arguments have none."""
_WINDOW = "window_size"
_WINDOW_LAYERS = "window_attn_skip_freq"
_LONGEST_SHOWN = 80
"""Longest value in an error, in characters."""
_FIX = "a Hugging Face folder, written by Megatron Bridge (AutoBridge.export_ckpt)"


class _EveryName:
    """Names that arguments may have: objects of any program, which stay names."""

    def __contains__(self, name: object) -> bool:
        return True


def read_arguments(folder: Path) -> Mapping[str, Any]:
    """Returns Megatron's arguments by name;
    of a checkpoint without them, as other trainers write it, none.

    Raises WeightsError for a file that cannot be read, and for arguments in another form.
    """
    file = folder / ARGUMENTS
    if not file.is_file():
        return {}
    try:
        check_inside(folder, [file])
        with open_bytes(file) as opened, zipfile.ZipFile(opened) as archive:
            found = [i for i in archive.infolist() if i.filename.endswith(f"/{_DESCRIPTION}")]
            if len(found) != 1:
                raise ValueError(
                    f"it has {len(found)} files {_DESCRIPTION}, and torch.save writes one"
                )
            content = read_pickled(read_member(archive, found[0], SMALL), _EveryName())
        return _arguments_in(content)
    except ZIP_ERRORS as error:
        refusal = WeightsError(f"reading {file}", reason_of(error), _FIX)
        raise by_class(error, refusal) from error


def _arguments_in(content: Any) -> Mapping[str, Any]:
    """Returns the arguments in what common.pt describes: a Namespace, or a dictionary.
    Raises ValueError."""
    if not isinstance(content, dict):
        raise ValueError("it has no dictionary")
    arguments = content.get("args")
    if arguments is None:
        return {}
    if isinstance(arguments, Call):
        arguments = arguments.state
    if not isinstance(arguments, dict):
        raise ValueError("its args are neither a Namespace nor a dictionary")
    return arguments


def check_arguments(folder: Path, model: Any) -> tuple[str, ...]:
    """Returns the names of Megatron's arguments that were compared with config.json, and agree.

    Raises WeightsError for an argument with which Megatron computes another function
    of the tensors.
    """
    return tuple(_Comparison(folder, read_arguments(folder), model).compared())


def _scalar(value: Any) -> Any:
    """Returns a text, a number or None; of anything else, which may be without end, its name."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Call | Named):
        return f"an object {value.name}"
    return f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    """Returns a value as an error shows it."""
    text = repr(_scalar(value))
    if len(text) > _LONGEST_SHOWN:
        return f"{text[:_LONGEST_SHOWN]} ..."
    return text


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Comparison of Megatron's arguments with the model of a config.json;
    an absent argument is not compared."""

    folder: Path
    arguments: Mapping[str, Any]
    model: Any

    def compared(self) -> Iterator[str]:
        """Yields the names of the arguments that agree.
        Raises WeightsError for the first that does not."""
        yield from self._computation()
        yield from self._fields()
        yield from self._interpolation()
        yield from self._scaling()
        yield from self._window()

    def _refused(self, name: str, value: str, truth: str, fix: str) -> WeightsError:
        asked = f"converting {self.folder}"
        found = f"Megatron trained it with {name} = {value} ({ARGUMENTS}); {truth}"
        return WeightsError(asked, found, fix)

    def _computation(self) -> Iterator[str]:
        """Compares what config.json has no field for."""
        for name, expected in _SAME_IN_ALL.items():
            if name not in self.arguments:
                continue
            value = self.arguments[name]
            if _scalar(value) != expected:
                truth = f"Hugging Face's model of these names computes {expected!r}"
                raise self._refused(name, _shown(value), truth, _FIX)
            yield name

    def _fields(self) -> Iterator[str]:
        """Compares fields of config.json that are one argument each."""
        for name, (field, theirs) in _OF_CONFIG.items():
            expected = getattr(self.model, field, None)
            if name not in self.arguments or expected is None:
                continue
            value = self.arguments[name]
            if _scalar(value) != expected:
                fix = f"the config.json of this model: {theirs} {_shown(value)}"
                raise self._refused(name, _shown(value), f"config.json has {expected!r}", fix)
            yield name

    def _interpolation(self) -> Iterator[str]:
        """Compares the factor by which positions are divided (`linear` in config.json);
        Megatron's `rope` has no YaRN."""
        if _POSITIONS in self.arguments and getattr(self.model, "yarn", None) is not None:
            value = _shown(self.arguments[_POSITIONS])
            fix = "the config.json of this model, without YaRN"
            raise self._refused(
                _POSITIONS, value, "config.json has a rope_scaling of type yarn", fix
            )
        if _INTERPOLATION not in self.arguments:
            return
        value = _scalar(self.arguments[_INTERPOLATION])
        expected = getattr(self.model, "rope_factor", 1.0)
        if value != expected and not (value is None and expected == 1.0):
            truth = f"config.json divides positions by {expected:g}"
            fix = (
                "the config.json of this model: rope_scaling of type linear with factor "
                f"{_shown(value)}"
            )
            if value is None:
                fix = "the config.json of this model, without a rope_scaling of type linear"
            raise self._refused(_INTERPOLATION, _shown(value), truth, fix)
        yield _INTERPOLATION

    def _scaling(self) -> Iterator[str]:
        """Compares Llama 3.1's scaling: Megatron has an argument for its factor,
        and constants for its other numbers."""
        if _SCALED not in self.arguments:
            return
        scaling: RopeScaling | None = getattr(self.model, "rope_scaling", None)
        value = _scalar(self.arguments[_SCALED])
        if value != (scaling is not None):
            truth = (
                f"config.json has {'no' if scaling is None else 'a'} rope_scaling of type llama3"
            )
            fix = "the config.json of this model, with its rope_scaling"
            raise self._refused(_SCALED, _shown(value), truth, fix)
        yield _SCALED
        if scaling is None:
            return
        factor = _scalar(self.arguments.get(_FACTOR, _DEFAULT_FACTOR))
        expected = dataclasses.replace(RopeScaling(), factor=scaling.factor)
        if factor != scaling.factor or scaling != expected:
            numbers = {"factor": factor, **_without_factor(RopeScaling())}
            found = {"factor": scaling.factor, **_without_factor(scaling)}
            fix = f"the config.json of this model: rope_scaling with {_numbers(numbers)}"
            truth = f"that is {_numbers(numbers)}, and config.json has {_numbers(found)}"
            raise self._refused(_FACTOR, _shown(factor), truth, fix)
        yield _FACTOR

    def _window(self) -> Iterator[str]:
        """Compares the sliding window: Megatron's (w, 0) is a token and the w
        before it, the window of config.json w + 1."""
        if _WINDOW not in self.arguments:
            return
        value = self.arguments[_WINDOW]
        shown, tokens = _shown(value), None
        if value is not None:
            sizes = _pair(value)
            if sizes is None or sizes[1] != 0:
                truth = "a pair (tokens before, 0) is one of a causal model, and None is no window"
                raise self._refused(_WINDOW, shown, truth, _FIX)
            shown = repr(sizes)
            tokens = None if sizes[0] < 0 else sizes[0] + 1
        expected = getattr(self.model, "sliding_window", None)
        if tokens != expected:
            sees = "all tokens before" if tokens is None else f"{tokens} tokens, itself included"
            truth = f"a token attends to {sees}, and config.json has sliding_window {expected}"
            wanted = "null" if tokens is None else str(tokens)
            fix = f"the config.json of this model: sliding_window {wanted}"
            raise self._refused(_WINDOW, shown, truth, fix)
        yield _WINDOW
        skipped = _scalar(self.arguments.get(_WINDOW_LAYERS))
        if tokens is not None and skipped is not None:
            truth = "Hugging Face's model of these names has the window in every layer"
            raise self._refused(_WINDOW_LAYERS, _shown(skipped), truth, _FIX)


def _without_factor(scaling: RopeScaling) -> dict[str, Any]:
    """Returns the numbers of a scaling that Megatron has as constants,
    as config.json names them."""
    numbers = dataclasses.asdict(scaling)
    del numbers["factor"]
    return numbers


def _numbers(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in numbers.items())


def _pair(value: Any) -> tuple[int, int] | None:
    """Returns two whole numbers; None for anything else."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    first, second = value
    if type(first) is not int or type(second) is not int:
        return None
    return first, second
