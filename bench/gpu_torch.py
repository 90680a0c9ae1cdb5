"""Workers of bench/gpu.py in PyTorch: `torch.compile` with flash attention, and Hugging Face's `Trainer`.

Started by bench/gpu.py: a line of facts as JSON, then a line of seconds per step for each line on standard input.
"""

import json
import math
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

JOB: dict[str, Any] = json.loads(sys.argv[-1])
SHAPE: dict[str, int] = JOB["shape"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = getattr(torch, JOB["dtype"])
EPSILON, THETA = 1e-5, 10000.0


class Layer(nn.Module):
    """Llama layer: grouped-query attention by `scaled_dot_product_attention`, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        D, N, K, F_ = (SHAPE[name] for name in ("width", "heads", "kv_heads", "mlp"))
        self.head = D // N
        self.norm_1, self.norm_2 = nn.RMSNorm(D, EPSILON), nn.RMSNorm(D, EPSILON)
        self.q, self.out = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.k, self.v = (
            nn.Linear(D, K * self.head, bias=False),
            nn.Linear(D, K * self.head, bias=False),
        )
        self.gate, self.up = nn.Linear(D, F_, bias=False), nn.Linear(D, F_, bias=False)
        self.down = nn.Linear(F_, D, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.norm_1(x)
        q, k, v = (
            z.view(*x.shape[:2], -1, self.head).transpose(1, 2)
            for z in (self.q(h), self.k(h), self.v(h))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary embedding."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class Llama(nn.Module):
    """Llama with separate tables."""

    def __init__(self) -> None:
        super().__init__()
        V, D = SHAPE["vocab"], SHAPE["width"]
        self.embed, self.unembed = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(SHAPE["layers"]))
        self.norm = nn.RMSNorm(D, EPSILON)
        head = D // SHAPE["heads"]
        frequencies = THETA ** (-torch.arange(0, head, 2) / head)
        angles = torch.outer(torch.arange(JOB["seq"]), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            if JOB["remat"] == "none":
                x = layer(x, self.cos, self.sin)
            else:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
        return F.cross_entropy(self.unembed(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def synchronize() -> None:
    """Waits for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def facts(model: nn.Module, compile_seconds: float, attention: str, versions: str) -> None:
    """Prints what bench/gpu.py needs to know of this side."""
    cuda = (
        f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        if DEVICE == "cuda"
        else ", CPU"
    )
    print(json.dumps({
        "parameters": sum(p.numel() for p in model.parameters()), "compile_seconds": compile_seconds,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu", "attention": attention,
        "versions": f"torch {torch.__version__}{cuda}{versions}",
    }), flush=True)  # fmt: skip


def serve_compiled() -> None:
    """Measures a compiled step of the plain model."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Llama().to(DEVICE)
    optimizer = torch.optim.AdamW(
        model.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=DEVICE == "cuda"
    )
    compiled = torch.compile(model)
    tokens = torch.randint(0, SHAPE["vocab"], (JOB["batch"], JOB["seq"] + 1), device=DEVICE)

    def step() -> torch.Tensor:
        with torch.autocast(DEVICE, DTYPE, enabled=torch.float32 != DTYPE):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    began = time.perf_counter()
    losses = [float(step()) for _ in range(3)]
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"the loss is not finite: {losses}")
    facts(model, time.perf_counter() - began, "scaled_dot_product_attention", "")
    for _ in sys.stdin:
        synchronize()
        start = time.perf_counter()
        for _ in range(JOB["steps"]):
            step()
        synchronize()
        print(json.dumps((time.perf_counter() - start) / JOB["steps"]), flush=True)


def serve_trainer() -> None:
    """Measures the steps of `Trainer.train`: a callback waits for standard input before each group of steps."""
    import tempfile

    import transformers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = LlamaConfig(
        vocab_size=SHAPE["vocab"], hidden_size=SHAPE["width"], intermediate_size=SHAPE["mlp"],
        num_hidden_layers=SHAPE["layers"], num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["kv_heads"],
        max_position_embeddings=JOB["seq"], rms_norm_eps=EPSILON, tie_word_embeddings=False, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    began = time.perf_counter()

    class Measure(TrainerCallback):  # type: ignore[misc]
        start = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            taken = state.global_step - 3
            if taken < 0 or taken % JOB["steps"]:
                return
            synchronize()
            if taken == 0:
                facts(
                    model,
                    time.perf_counter() - began,
                    "sdpa",
                    f", transformers {transformers.__version__}",
                )
            else:
                print(json.dumps((time.perf_counter() - self.start) / JOB["steps"]), flush=True)
            if not sys.stdin.readline():
                control.should_training_stop = True
            synchronize()
            self.start = time.perf_counter()

    rows = torch.randint(0, SHAPE["vocab"], (64 * JOB["batch"], JOB["seq"]))
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out, per_device_train_batch_size=JOB["batch"], max_steps=1_000_000, learning_rate=3e-4,
            weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0, bf16=torch.bfloat16 == DTYPE, report_to=[],
            logging_strategy="no", save_strategy="no", disable_tqdm=True, use_cpu=DEVICE == "cpu",
            optim="adamw_torch_fused" if DEVICE == "cuda" else "adamw_torch",
            **({} if JOB["remat"] == "none" else {"gradient_checkpointing": True}),
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Measure()]).train()


if __name__ == "__main__":
    (serve_trainer if sys.argv[-2] == "Trainer" else serve_compiled)()
