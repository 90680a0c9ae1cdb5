"""Train step that torchax makes of a PyTorch module and an Optax optimizer.

After https://github.com/google/torchax (torchax.train.make_train_step)
"""

import jax
import optax
from jax.sharding import PartitionSpec as P
from placed import mesh_of, on


def _placeholders(torch):
    """Gives torchax 0.0.13 something for the operators it names that torch has dropped (aten.cholesky, aten.qr)."""
    found = torch._ops._OpNamespace.__getattr__
    overload = torch._ops.OpOverloadPacket.__getattr__

    class Dropped:
        def __getattr__(self, name):
            return Dropped()

    def namespace(self, name):
        try:
            return found(self, name)
        except AttributeError:
            return Dropped()

    def packet(self, name):
        try:
            return overload(self, name)
        except AttributeError:
            return Dropped()

    torch._ops._OpNamespace.__getattr__, torch._ops.OpOverloadPacket.__getattr__ = namespace, packet
    return found, overload


def build(devices):
    import torch

    found, overload = _placeholders(torch)
    import torchax
    from torchax import interop
    from torchax.train import make_train_step

    env = torchax.default_env()
    torch._ops._OpNamespace.__getattr__, torch._ops.OpOverloadPacket.__getattr__ = found, overload

    mesh = mesh_of(devices, data=8)
    module = torch.nn.Sequential(
        torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)
    )
    weights = {
        k: jax.ShapeDtypeStruct(tuple(v.shape), "float32") for k, v in module.named_parameters()
    }
    tx = optax.adamw(1e-3)

    def model(weights, buffers, x):
        return torch.func.functional_call(module, {**weights, **buffers}, (x,))

    step = interop.jax_view(make_train_step(model, torch.nn.functional.mse_loss, tx))

    def train_step(weights, state, x, y):
        with env:
            return step(weights, {}, state, x, y)

    x, y = jax.ShapeDtypeStruct((64, 128), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    state = on(mesh, jax.eval_shape(tx.init, weights))
    return jax.jit(train_step), (
        on(mesh, weights),
        state,
        on(mesh, x, P("data")),
        on(mesh, y, P("data")),
    )
