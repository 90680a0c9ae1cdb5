"""One step of a Hugging Face model by `transformers`, forward and backward,
with one layer in float32 at a time.

`transformers` builds the model and reads its files in their own type; its own forward pass is
called. Each layer's parameters become float32 for the layer's turn only. The tensors inside of a
layer are found by the names that `transformers` gives its modules:

    layer(hidden_states)                   input
      input_layernorm -> self_attn(h)      attention input, attention output
      x + ... -> post_attention_layernorm  attention residual
              -> mlp(h)                    feed-forward input, feed-forward output
                                           output
"""

import contextlib
import dataclasses
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from meshwright.errors import ConfigError
from meshwright.hugging_face.folder import WeightsFolder
from meshwright.hugging_face.names import read_block
from meshwright.models.recording import EMBEDDING, FINAL_NORM, LOG_SUM_EXP, TOKEN_LOSS, TensorName
from meshwright.sharding.params import Param, named_leaves

Named = tuple[TensorName, np.ndarray]

_ONLY_HALF = "mixer"
"""The half of a layer that has only one (Nemotron-H)."""
_ATTENTION = ("self_attn", "attn", "attention", "linear_attn", "mamba", _ONLY_HALF)
_SHARED = "shared_mlp"
_FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe", "moe", _SHARED, _ONLY_HALF)
_OUTPUT_PROJECTION = ("o_proj", "c_proj", "out_proj", "dense")
_NORM_AFTER_ATTENTION = ("post_attention_layernorm",)
_NORM_AFTER_MLP = ("post_feedforward_layernorm",)
_NORM_BEFORE_MLP = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2")


def check_installed() -> None:
    """Raises ConfigError where `torch` or `transformers` is not installed. Imports neither."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "parity --against transformers",
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, and "
            "the step is computed by both programs",
            "pip install 'meshwright[transformers]', or torch and transformers of your own in this "
            "environment",
        )


@dataclasses.dataclass(frozen=True)
class TransformersSource:
    """Source of the named tensors of one step, as `transformers` computes them;
    iterating takes the step."""

    weights: WeightsFolder
    documents: np.ndarray
    """Tokens [documents, T + 1]. Each is a sequence of its own here,
    and a part of one sequence in Meshwright."""

    def __iter__(self) -> Iterator[Named]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from _Step(self).tensors()


@dataclasses.dataclass
class _Layer:
    """A layer of the model of `transformers`, and what its last call had."""

    module: Any
    forward: Callable[..., Any]
    """The layer's own forward pass."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    """Arguments of the call besides the hidden states."""
    x: Any = None
    """Hidden states that the call was given."""


class _Step:
    """One step of a model that `transformers` has loaded."""

    def __init__(self, source: TransformersSource) -> None:
        import torch
        import transformers

        self._torch: Any = torch
        self._source = source
        folder = source.weights.folder
        transformers.utils.logging.disable_progress_bar()
        config = transformers.AutoConfig.from_pretrained(folder.path)
        model_class = getattr(transformers, config.architectures[0])
        self._model = model_class.from_pretrained(
            folder.path, dtype="auto", attn_implementation="eager"
        ).eval()
        model: Any = folder.model
        self._spec = model.spec()
        self._blocks = model.decoder.layers
        factor: float | None = model.decoder.logit_factor
        self._logit_factor = 1.0 if factor is None else factor
        modules = self._find_layers(len(self._spec.layers))
        self._layers = [_Layer(module, module.forward) for module in modules]
        inside = {id(p) for module in modules for p in module.parameters()}
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if id(tensor) not in inside and tensor.is_floating_point():
                tensor.data = tensor.data.float()

    def _find_layers(self, count: int) -> Sequence[Any]:
        """Returns the layers of the text model."""
        for name, module in self._model.named_modules():
            is_list = isinstance(module, self._torch.nn.ModuleList) and len(module) == count
            if is_list and not any(part in name for part in ("vision", "visual", "audio")):
                layers: Sequence[Any] = module
                return layers
        raise ConfigError(
            f"parity of {self._source.weights.folder.path} against transformers",
            f"{type(self._model).__name__} has no list of {count} layers",
            "a release of transformers that computes this architecture",
        )

    def tensors(self) -> Iterator[Named]:
        """Yields every tensor in the order of computation."""
        yield from self._forward()
        last = self._last
        first, final, logits = self._outside(last)
        yield from self._loss(final, logits)
        yield from self._backward_after_layers()
        g = last.grad
        for number in reversed(range(len(self._layers))):
            yield TensorName("backward", "output", number), self._packed(g)
            found, g = self._backward_of_layer(number, g)
            yield from found
        yield TensorName("backward", EMBEDDING), self._packed(g)
        first.backward(g)
        before = self._gradients(self._model, lambda p: True)
        yield from self._gradients_outside(before, before_layers=True)

    def _forward(self) -> Iterator[Named]:
        """Yields the tensors of the forward pass up to the last layer."""
        recorded: list[Named] = []
        for number, layer in enumerate(self._layers):
            layer.module.forward = self._recording_forward(number, layer, recorded)
        with self._torch.no_grad():
            self._logits()
        yield TensorName("forward", EMBEDDING), self._packed(self._layers[0].x)
        yield from recorded

    def _loss(self, final: Any, logits: Any) -> Iterator[Named]:
        """Yields the tensors of the loss, and differentiates it. final: of the last norm."""
        torch = self._torch
        lse = torch.logsumexp(logits, -1)
        targets = torch.tensor(self._source.documents[:, 1:], dtype=torch.long)
        losses = lse - logits.gather(-1, targets[..., None])[..., 0]
        # Meshwright multiplies the hidden states by the factor on logits,
        # and `transformers` the logits.
        factor = self._logit_factor
        yield TensorName("forward", FINAL_NORM), self._packed(final) * factor
        yield TensorName("forward", LOG_SUM_EXP), self._packed(lse)
        yield TensorName("forward", TOKEN_LOSS), self._packed(losses)
        losses.mean().backward(retain_graph=True)
        yield TensorName("backward", FINAL_NORM), self._packed(final.grad) / factor

    def _backward_after_layers(self) -> list[Named]:
        """Returns the gradients of the parameters after the layers;
        a table that is tied has its own later."""
        table = self._model.get_input_embeddings().weight
        after = self._gradients(self._model, lambda p: p is not table)
        return self._gradients_outside(after, before_layers=False)

    def _backward_of_layer(self, number: int, g: Any) -> tuple[list[Named], Any]:
        """Returns the gradients of a layer, and that of its input. g: that of its output."""
        layer = self._layers[number]
        with self._in_float32(layer.module):
            captured, g = self._differentiate(number, layer, g)
            gradients = self._gradients(layer.module, lambda p: True)
            return captured + self._gradients_of_layer(gradients, number), g

    def _logits(self) -> Any:
        tokens = self._torch.tensor(self._source.documents[:, :-1], dtype=self._torch.long)
        return self._model(tokens, use_cache=False).logits.float()

    def _packed(self, x: Any) -> np.ndarray:
        """Returns documents [documents, T, ...] as one sequence [1, documents T, ...]."""
        array = x.detach().float().numpy()
        tokens = self._source.documents[:, 1:].size
        # Some feed-forward halves return all tokens in one dimension.
        features = array.shape[1:] if len(array) == tokens else array.shape[2:]
        return array.reshape(1, tokens, *features).copy()

    # Forward pass of a layer.

    def _recording_forward(
        self, number: int, layer: _Layer, recorded: list[Named]
    ) -> Callable[..., Any]:
        """Returns a forward pass that keeps the layer's arguments, and records its tensors."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                x, layer.arguments = args[0], (args[1:], kwargs)
            else:
                x = kwargs.pop("hidden_states")
                layer.arguments = ((), kwargs)
            layer.x = x
            with self._in_float32(layer.module), self._captured(number, layer) as captured:
                output = layer.forward(x, *layer.arguments[0], **layer.arguments[1])
            recorded.extend(
                (TensorName("forward", name, number), array)
                for name, array in self._arrays(number, captured)
            )
            hidden = _hidden(output)
            recorded.append((TensorName("forward", "output", number), self._packed(hidden)))
            self._last = hidden.detach().clone().requires_grad_()
            return output

        return forward

    def _arrays(self, number: int, captured: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields tensors of a layer in the order of computation, as Meshwright has their shapes."""
        from meshwright.models.recording import LAYER_TENSORS

        for name in LAYER_TENSORS:
            if name not in captured:
                continue
            array = self._packed(captured[name])
            attention = self._spec.layers[number].attention
            if name == "attention heads" and attention is not None:
                array = array.reshape(*array.shape[:2], -1, attention.value_size)
            yield name, array

    @contextlib.contextmanager
    def _in_float32(self, module: Any) -> Iterator[None]:
        """Gives a layer's parameters and buffers as float32,
        and afterwards their own type again."""
        tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
        stored = [t.data for t in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
        for tensor, data in zip(tensors, stored, strict=True):
            tensor.grad = None
            tensor.data = data

    @contextlib.contextmanager
    def _captured(self, number: int, layer: _Layer) -> Iterator[dict[str, Any]]:
        """Captures the tensors inside of a layer, by our names."""
        capture = _Capture(layer.x)
        self._capture_attention(capture, number, layer.module)
        self._capture_feed_forward(capture, number, layer.module)
        self._capture_residual(capture, number, layer.module)
        yield capture.tensors
        capture.remove()

    def _capture_attention(self, capture: "_Capture", number: int, module: Any) -> None:
        """Captures input, heads and output of the attention half, where `transformers` names it."""
        block = self._blocks[number]
        if block.attention is None:
            return
        attention = _child(module, _ATTENTION)
        if attention is not None:
            capture.input_of(attention, "attention input")
            projection = _child(attention, _OUTPUT_PROJECTION)
            is_gated = getattr(block.attention, "gated", False)
            has_heads = self._spec.layers[number].attention is not None
            if projection is not None and has_heads and not is_gated:
                capture.input_of(projection, "attention heads")
        adds = attention
        if block.normalises_outputs:
            adds = _child(module, _NORM_AFTER_ATTENTION)
        if adds is not None:
            capture.output_of(adds, "attention output")

    def _capture_feed_forward(self, capture: "_Capture", number: int, module: Any) -> None:
        """Captures input and output of the feed-forward half, where `transformers` names it."""
        block = self._blocks[number]
        if block.feed_forward is None:
            return
        feed_forward = _child(module, _FEED_FORWARD)
        if feed_forward is not None:
            capture.input_of(feed_forward, "feed-forward input")
        adds = feed_forward
        if _child(module, (_SHARED,)) not in (None, feed_forward):
            # Another module computes the shared expert: the output of the half is the sum of both.
            adds = None
        if block.normalises_outputs:
            adds = _child(module, _NORM_AFTER_MLP)
        if adds is not None:
            capture.output_of(adds, "feed-forward output")

    def _capture_residual(self, capture: "_Capture", number: int, module: Any) -> None:
        """Captures the residual stream between both halves: what the first module
        of the second half reads."""
        reader = _child(module, _NORM_BEFORE_MLP)
        if self._blocks[number].norm_place == "after":
            reader = _child(module, _FEED_FORWARD)
        if reader is not None:
            capture.input_of(reader, "attention residual")

    # Backward pass.

    def _outside(self, last: Any) -> tuple[Any, Any, Any]:
        """Computes what comes before and after the layers, with gradients.

        last: output of the last layer.
        Returns the input of the first layer, the final norm, and the logits.
        """
        first: list[Any] = []
        for number, layer in enumerate(self._layers):
            layer.module.forward = self._skipping_forward(number, first, last)
        final: list[Any] = []
        head = self._model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _, args: final.append(args[0]))
        logits = self._logits()
        handle.remove()
        final[0].retain_grad()
        return first[0], final[0], logits

    def _skipping_forward(self, number: int, first: list[Any], last: Any) -> Callable[..., Any]:
        """Returns a layer's forward pass that computes nothing: the last returns what it
        returned before."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            if number == 0:
                first.append(x)
            return last if number == len(self._layers) - 1 else x.detach()

        return forward

    def _differentiate(self, number: int, layer: _Layer, g: Any) -> tuple[list[Named], Any]:
        """Runs a layer again and differentiates it;
        returns gradients inside of it, and that of its input."""
        x = layer.x.detach().clone().requires_grad_()
        layer.x = x
        with self._captured(number, layer) as captured:
            output = _hidden(layer.forward(x, *layer.arguments[0], **layer.arguments[1]))
        for tensor in captured.values():
            if tensor is not x:
                tensor.retain_grad()
        output.backward(g)
        layer.x = None
        inside = {n: t.grad for n, t in captured.items() if t.grad is not None}
        block = self._blocks[number]
        if block.norm_place in ("after", "shared"):
            # Each half reads the residual stream itself,
            # or one norm: its gradient is that of all that reads it.
            inside.pop("attention input", None)
            inside.pop("feed-forward input", None)
        named = [
            (TensorName("backward", name, number), array)
            for name, array in self._arrays(number, inside)
        ]
        return named[::-1], x.grad

    def _gradients(self, module: Any, wanted: Callable[[Any], bool]) -> dict[str, Any]:
        """Takes the gradients of a module's parameters, by their names in the model."""
        members = {id(p) for p in module.parameters()}
        found: dict[str, Any] = {}
        for name, p in self._model.named_parameters():
            if id(p) in members and p.grad is not None and wanted(p):
                found[name] = p.grad
                p.grad = None
        return found

    def _in_files(self, gradients: dict[str, Any]) -> dict[str, np.ndarray]:
        """Returns gradients by the names and in the layout of the tensors in the folder's files."""
        from transformers.core_model_loading import revert_weight_conversion

        prefix = self._source.weights.prefix
        stored: dict[str, np.ndarray] = {}
        for name, gradient in revert_weight_conversion(self._model, gradients).items():
            text_name = prefix.name_in_text_model(name) if prefix else name
            if text_name is not None:
                stored[text_name] = gradient.float().numpy()
        return stored

    def _gradients_outside(self, gradients: dict[str, Any], *, before_layers: bool) -> list[Named]:
        """Returns gradients of the parameters before the layers (tables),
        or after them, as Meshwright has them."""
        weights = self._source.weights
        stored = self._in_files(gradients)
        found: list[Named] = []
        for path, p in named_leaves(weights.folder.model.params()).items():
            name = TensorName("parameters", path)
            is_before = name.row[0] == 0
            if weights.stored[path].layers or is_before != before_layers:
                continue
            gradient = self._gradient(path, p, _entire(p), stored)
            if gradient is not None:
                found.append((name, gradient))
        return _in_order(found)

    def _gradients_of_layer(self, gradients: dict[str, Any], number: int) -> list[Named]:
        """Returns gradients of the parameters of a layer, as Meshwright has them."""
        stack = self._spec.layers[number].stack
        row = self._spec.layers_of(stack).index(number)
        stored = self._in_files(gradients)
        found: list[Named] = []
        for path, p in named_leaves(self._source.weights.folder.model.params()).items():
            path_stack, _, name = path.partition(".")
            if path_stack != stack:
                continue
            index = (slice(row, row + 1), *_entire(p)[1:])
            gradient = self._gradient(path, p, index, stored)
            if gradient is not None:
                found.append((TensorName("parameters", name, number), gradient[0]))
        return _in_order(found)

    def _gradient(
        self, path: str, p: Param, index: tuple[slice, ...], stored: dict[str, np.ndarray]
    ) -> np.ndarray | None:
        """Returns the gradient of a part of a parameter; None where a tensor of it has none."""
        tensor = self._source.weights.stored[path]
        needed = {name for name, _, _ in tensor.blocks(p, index)}
        if not needed <= stored.keys():
            return None
        return read_block(p, tensor, index, stored.__getitem__, np.float32)


class _Capture:
    """Tensors that modules of a layer read and return, by our names."""

    def __init__(self, x: Any) -> None:
        self.tensors: dict[str, Any] = {"input": x}
        self._handles: list[Any] = []

    def input_of(self, module: Any, name: str) -> None:
        """Captures the hidden states that a module is called with."""

        def hook(_: Any, args: Any, kwargs: Any) -> None:
            self.tensors[name] = args[0] if args else kwargs["hidden_states"]

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def output_of(self, module: Any, name: str) -> None:
        """Captures the hidden states that a module returns."""

        def hook(_: Any, args: Any, output: Any) -> None:
            self.tensors[name] = _hidden(output)

        self._handles.append(module.register_forward_hook(hook))

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


def _entire(p: Param) -> tuple[slice, ...]:
    """Returns the index of all of a parameter."""
    return tuple(slice(0, size) for size in p.shape)


def _in_order(named: list[Named]) -> list[Named]:
    """Returns tensors in the order of computation."""
    return sorted(named, key=lambda pair: (pair[0].order, pair[0]))


def _hidden(output: Any) -> Any:
    """Returns the hidden states of what a module returns."""
    return output[0] if isinstance(output, tuple | list) else output


def _child(module: Any, names: Sequence[str]) -> Any:
    """Returns the child of a module that has one of these names, or None."""
    for name in names:
        found = getattr(module, name, None)
        if found is not None:
            return found
    return None
