"""Megatron's names and order in `torch_dist` checkpoints
of Llama, Mistral, Mixtral, Qwen2 and Qwen3.

megatron-core writes them with `torch.distributed.checkpoint` (`torch_checkpoints` reads the files).
The layers of a stack, and the experts of a layer, are one tensor:

    decoder.layers.self_attention.linear_qkv.weight [L, (N + 2 K) H, D]
        rows of a key/value head and its queries:  G H of q | H of k | H of v,  K times
    decoder.layers.mlp.linear_fc1.weight [L, 2 F, D]
        F rows of the gate | F rows of the other half
    decoder.layers.mlp.experts.experts.linear_fc1.weight [L, E, 2 F, D]

Both programs have the numbers of a rotary pair half a head apart. Megatron fills up the vocabulary
with rows that no token has.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import WeightsError
from meshwright.hugging_face.megatron_arguments import ARGUMENTS, check_arguments
from meshwright.hugging_face.torch_checkpoints import TorchTensor, read_chunk

MIXTRAL = "MixtralForCausalLM"
MEGATRON_ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", MIXTRAL),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
)
"""Architectures whose names in Megatron are known."""
_STACKED = re.compile(r"decoder\.layers\.(\D.*)")
_STATES = re.compile(r"(chained_\d+\.)?optimizer\.")
_VOCABULARY = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}
_FINAL_NORM = "decoder.final_layernorm.weight"
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "block_sparse_moe.gate.weight",
}
"""Tensors of a layer that have Hugging Face's rows."""
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_FC1 = "mlp.linear_fc1.weight"
_EXPERT_FC1 = "mlp.experts.experts.linear_fc1.weight"
_EXPERT_FC2 = "mlp.experts.experts.linear_fc2.weight"


def is_megatron(tensors: Mapping[str, TorchTensor]) -> bool:
    """Whether the tensors of a checkpoint have Megatron's names."""
    names = map(_inner_name, tensors)
    return any(name.startswith("decoder.") or name in _VOCABULARY for name in names)


def _inner_name(name: str) -> str:
    """Returns the name of a tensor in GPTModel, around which NeMo 2 saves its own `module`."""
    return name.removeprefix("module.")


@dataclasses.dataclass(frozen=True)
class MegatronTensor:
    """One of Hugging Face's tensors: rows of a layer, or of an expert of a layer, of Megatron's."""

    own_name: str
    tensor: TorchTensor
    stack: tuple[int, ...] = ()
    """Numbers of the layer and of the expert."""
    rows: np.ndarray | None = None
    """Row in Megatron's tensor of each of Hugging Face's; None: the same rows."""

    @property
    def code(self) -> str:
        """Type, as safetensors files name it."""
        return self.tensor.code

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of Hugging Face's tensor."""
        shape = self.tensor.shape[len(self.stack) :]
        if self.rows is None:
            return shape
        return len(self.rows), *shape[1:]

    def blocks(self) -> Iterator[tuple[Any, np.ndarray]]:
        """Yields parts of Hugging Face's tensor: where each is in it, and its values."""
        depth = len(self.stack)
        rows = self.rows
        if rows is None:
            rows = np.arange(self.tensor.shape[depth])
        for chunk in self.tensor.chunks:
            stacked = chunk.block[:depth]
            if any(
                not (part.start <= n < part.stop)
                for part, n in zip(stacked, self.stack, strict=True)
            ):
                continue
            stored, *columns = chunk.block[depth:]
            (placed,) = np.nonzero((rows >= stored.start) & (rows < stored.stop))
            if not len(placed):
                continue
            values = read_chunk(self.own_name, self.tensor.code, chunk)
            inside = tuple(n - part.start for part, n in zip(stacked, self.stack, strict=True))
            yield (placed, *columns), values[inside][rows[placed] - stored.start]


@dataclasses.dataclass(frozen=True)
class _Names:
    """Hugging Face's names of Megatron's tensors, for one model."""

    folder: Path
    model: Any

    def of(self, name: str, tensor: TorchTensor) -> Iterator[tuple[str, MegatronTensor]]:
        """Yields Hugging Face's names and tensors of one of Megatron's.
        Raises WeightsError for another model's."""
        if not tensor.code:
            raise self._refused(f"{name!r} is of a type that no weight has")
        inner = _inner_name(name)
        if inner in _VOCABULARY:
            rows = self._vocabulary(name, tensor)
            yield _VOCABULARY[inner], MegatronTensor(name, tensor, (), rows)
            return
        if inner == _FINAL_NORM:
            yield "model.norm.weight", MegatronTensor(name, tensor)
            return
        stacked = _STACKED.fullmatch(inner)
        if stacked is None:
            raise self._unknown(name)
        self._check_size(name, tensor, 0, "layers", self.model.layers)
        for layer in range(self.model.layers):
            for theirs, part in self._of_layer(name, stacked[1], tensor, layer):
                yield f"model.layers.{layer}.{theirs}", part

    def _of_layer(
        self, name: str, inner: str, tensor: TorchTensor, layer: int
    ) -> Iterator[tuple[str, MegatronTensor]]:
        """Yields names after `model.layers.N.` and tensors of a layer of a stack."""
        qkv = _QKV.fullmatch(inner)
        if inner in _LAYER:
            yield _LAYER[inner], MegatronTensor(name, tensor, (layer,))
        elif qkv is not None:
            for letter, rows in self._qkv_rows(name, tensor).items():
                part = MegatronTensor(name, tensor, (layer,), rows)
                yield f"self_attn.{letter}_proj.{qkv[1]}", part
        elif inner == _FC1:
            gate, up = self._halves(name, tensor, 1)
            yield "mlp.gate_proj.weight", MegatronTensor(name, tensor, (layer,), gate)
            yield "mlp.up_proj.weight", MegatronTensor(name, tensor, (layer,), up)
        elif inner in (_EXPERT_FC1, _EXPERT_FC2):
            self._check_size(name, tensor, 1, "experts", getattr(self.model, "experts", 0))
            for expert in range(tensor.shape[1]):
                start = f"block_sparse_moe.experts.{expert}"
                if inner == _EXPERT_FC2:
                    yield f"{start}.w2.weight", MegatronTensor(name, tensor, (layer, expert))
                    continue
                gate, up = self._halves(name, tensor, 2)
                yield f"{start}.w1.weight", MegatronTensor(name, tensor, (layer, expert), gate)
                yield f"{start}.w3.weight", MegatronTensor(name, tensor, (layer, expert), up)
        else:
            raise self._unknown(name)

    def _qkv_rows(self, name: str, tensor: TorchTensor) -> dict[str, np.ndarray]:
        """Returns the rows of queries, keys and values: those
        of a key/value head follow one another."""
        heads, kv_heads = self.model.heads, self.model.kv_heads
        blocks = heads + 2 * kv_heads
        if len(tensor.shape) < 2 or tensor.shape[1] % blocks:
            raise self._refused(
                f"{name!r} has the shape {list(tensor.shape)}, and rows of {heads} + 2 x "
                f"{kv_heads} = {blocks} heads of config.json are a multiple of that"
            )
        queries = heads // kv_heads
        numbers = np.arange(tensor.shape[1]).reshape(kv_heads, queries + 2, -1)
        return {
            "q": numbers[:, :queries].reshape(-1),
            "k": numbers[:, queries].reshape(-1),
            "v": numbers[:, queries + 1].reshape(-1),
        }

    def _halves(self, name: str, tensor: TorchTensor, dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of the gate, and of what it multiplies."""
        if len(tensor.shape) <= dim or tensor.shape[dim] % 2:
            raise self._refused(f"{name!r} has the shape {list(tensor.shape)}, which has no halves")
        first, second = np.split(np.arange(tensor.shape[dim]), 2)
        return first, second

    def _vocabulary(self, name: str, tensor: TorchTensor) -> np.ndarray:
        """Returns the rows that tokens have."""
        vocab = self.model.vocab
        if tensor.shape[0] < vocab:
            raise self._refused(
                f"{name!r} has {tensor.shape[0]} rows, and config.json has {vocab} tokens"
            )
        return np.arange(vocab)

    def _check_size(
        self, name: str, tensor: TorchTensor, dim: int, what: str, expected: int
    ) -> None:
        if len(tensor.shape) <= dim or tensor.shape[dim] != expected:
            raise self._refused(
                f"{name!r} has the shape {list(tensor.shape)}, with {what} in dimension {dim}, and "
                f"config.json has {expected}"
            )

    def _refused(self, truth: str) -> WeightsError:
        return WeightsError(f"converting {self.folder}", truth, "the config.json of this model")

    def _unknown(self, name: str) -> WeightsError:
        return WeightsError(
            f"converting {self.folder}",
            f"it has a tensor {name!r}, which is none of Megatron's Llama, Mistral, Mixtral, Qwen2 "
            "or Qwen3",
            "a Hugging Face folder, written by Megatron Bridge (AutoBridge.export_ckpt)",
        )


def megatron_tensors(
    folder: Path, tensors: Mapping[str, TorchTensor], objects: int, model: Any
) -> tuple[dict[str, MegatronTensor], tuple[str, ...]]:
    """Returns Megatron's tensors by Hugging Face's names, and notes on what is not read.

    objects: number of pickled objects in the checkpoint.
    model: that of config.json. Raises WeightsError for a tensor of another model.
    """
    names = _Names(folder, model)
    compared = check_arguments(folder, model)
    found: dict[str, MegatronTensor] = {}
    states: list[str] = []
    for own_name, tensor in tensors.items():
        if _STATES.match(own_name):
            states.append(own_name)
            continue
        for theirs, part in names.of(own_name, tensor):
            if theirs in found:
                truth = f"{own_name!r} and {found[theirs].own_name!r} are the same tensor"
                raise WeightsError(f"converting {folder}", truth, "one of the two")
            found[theirs] = part
    return found, tuple(_notes(tensors, states, objects, compared, model))


def _notes(
    tensors: Mapping[str, TorchTensor],
    states: list[str],
    objects: int,
    compared: tuple[str, ...],
    model: Any,
) -> Iterator[str]:
    """Yields what is not read."""
    if states:
        training = f"{len(states)} tensors of the training, such as {min(states)}"
        yield f"{training}, are not read: optimizer"
    yield f"{objects} pickled objects (states of modules) are not read"
    if compared:
        yield (
            f"Megatron's arguments ({ARGUMENTS}) that are compared agree with config.json: "
            f"{', '.join(compared)}"
        )
    else:
        yield (
            f"it has no arguments of Megatron that are compared ({ARGUMENTS}): norms and rotary "
            "embedding are those of config.json; a model of --rotary-interleaved or "
            "--apply-layernorm-1p computes something else"
        )
    padding = {
        name: tensor.shape[0] - model.vocab
        for name, tensor in tensors.items()
        if _inner_name(name) in _VOCABULARY
    }
    for name, rows in padding.items():
        if rows:
            yield f"{rows} rows of {name} that no token has are left out"
