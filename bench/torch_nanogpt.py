"""nanoGPT's CPU setting as a train step in PyTorch, for `turns.py`: `python bench/torch_nanogpt.py eager|compiled`.

Both have the fused AdamW. Threads are as many as cores that the process may use.
"""

import os
import sys

import torch
import torch.nn.functional as F
import turns
from torch import nn

D, H, L, T, B, V = 128, 4, 4, 64, 12, 65


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            z.view(*x.shape[:2], H, D // H).transpose(1, 2)
            for z in self.qkv(self.norm_1(x)).split(D, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks, self.norm = (
            nn.ModuleList(Block() for _ in range(L)),
            nn.LayerNorm(D, bias=False),
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(T))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.norm(x) @ self.embed.weight.T).view(-1, V), targets.view(-1))


torch.manual_seed(0)
torch.set_num_threads(len(os.sched_getaffinity(0)))
model = Gpt()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
loss_of = torch.compile(model) if sys.argv[1] == "compiled" else model
tokens, targets = torch.randint(0, V, (B, T)), torch.randint(0, V, (B, T))


def steps(count: int) -> None:
    for _ in range(count):
        loss = loss_of(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


turns.serve(steps)
