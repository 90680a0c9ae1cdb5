"""Scaling laws: the model size and tokens with the least loss for a number of FLOPs.

L(N, D) = E + A / N^alpha + B / D^beta for N parameters and D tokens, with 6 N D FLOPs (Hoffmann et al. 2022, Training
Compute-Optimal Large Language Models, arXiv:2203.15556, section 3.3). The optimum is N = G (C/6)^(beta/(alpha+beta))
and D = (C/6) / N with G = (alpha A / (beta B))^(1/(alpha+beta)) (equation 4).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """Fitted constants of the loss."""

    name: str
    source: str
    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Returns the loss in nats per token."""
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """Returns the parameters and tokens with the least loss for this many FLOPs."""
        both = self.alpha + self.beta
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        parameters = g * (flops / 6) ** (self.beta / both)
        return parameters, flops / 6 / parameters


SCALING_LAWS = {
    law.name: law
    for law in (
        ScalingLaw(
            "besiroglu2024", "Besiroglu et al. 2024, arXiv:2404.10102: Hoffmann's third approach, fitted again",
            e=1.8172, a=482.01, b=2085.43, alpha=0.3478, beta=0.3658,
        ),
        ScalingLaw(
            "hoffmann2022", "Hoffmann et al. 2022, arXiv:2203.15556, third approach as printed",
            e=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28,
        ),
    )
}  # fmt: skip
"""Scaling laws by name. The second is known to fit its own data badly (arXiv:2404.10102); it is here to compare."""
