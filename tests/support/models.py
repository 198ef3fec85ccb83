"""Models and data that every stage must train correctly.

`AwkwardModel` gathers, in one small module, the shapes of model that sharding code gets wrong. Its docstring has the
list; a new kind of trouble belongs there, so that the whole test matrix meets it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 13
HIDDEN = 7
INNER = 5
SEQUENCE = 5


class Block(nn.Module):
    """A residual block: LayerNorm, Linear up to INNER, GELU, Linear back. Keeps the shape [..., HIDDEN]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class AwkwardModel(nn.Module):
    """A language model of about 700 elements whose initial weights depend on `seed` alone.

    It has: a weight tied between embedding and head; a frozen layer in the middle of the graph; a parameter with no
    elements; a trainable layer that forward never uses; odd sizes throughout; a persistent and a non-persistent buffer,
    and a counter that forward changes; repeated blocks; a parameter owned by the root itself; a layer called twice in
    one forward; and, with `mixed_dtypes`, one layer in bfloat16 while the rest is in float32.

    seed: of the initial weights. The caller's random state is left as it was.
    num_blocks: repeated blocks, at least 1.
    """

    def __init__(self, seed: int = 0, num_blocks: int = 4, mixed_dtypes: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.scale = nn.Parameter(1 + 0.1 * torch.randn(HIDDEN))
            self.empty = nn.Parameter(torch.empty(0, HIDDEN))
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
            self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
            self.twice = nn.Linear(HIDDEN, HIDDEN)
            self.unused = nn.Linear(INNER, 3)
            self.norm = nn.LayerNorm(HIDDEN)
            self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight
        self.register_buffer("position_scale", torch.linspace(0.5, 1.5, SEQUENCE))
        self.register_buffer("mask", torch.ones(SEQUENCE, 1), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        if mixed_dtypes:
            self.twice.to(torch.bfloat16)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, a float32 scalar. ids, targets: int64 [batch, SEQUENCE]."""
        if self.training:
            self.calls += 1
        hidden = self.embedding(ids) * self.scale + self.empty.sum()
        hidden = hidden * (self.position_scale[:, None] * self.mask).to(hidden.dtype)
        hidden = hidden + self.frozen(hidden)
        for block in self.blocks:
            hidden = self._apply_twice(block(hidden)) if block is self.blocks[0] else block(hidden)
        logits = self.head(self.norm(self._apply_twice(hidden)))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _apply_twice(self, hidden: Tensor) -> Tensor:
        """One of the two uses of the layer `twice`, which may have a dtype of its own."""
        return hidden + torch.tanh(self.twice(hidden.to(self.twice.weight.dtype))).to(hidden.dtype)


def batches(seed: int, count: int, micro_batch: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `count` pairs (ids, targets), int64 [micro_batch, SEQUENCE], that depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield tuple(torch.randint(VOCABULARY, (2, micro_batch, SEQUENCE), generator=generator))


def param_groups(model: nn.Module, lr: float = 1e-2, weight_decay: float = 0.1) -> list[dict]:
    """Return two optimizer groups of the trainable parameters, in registration order.

    Matrices decay and train at `lr`; everything else does not decay and trains at half of it.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    others = [parameter for parameter in trainable if parameter.ndim < 2]
    return [
        {"params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"params": others, "lr": lr / 2, "weight_decay": 0.0},
    ]


class Branches(nn.Module):
    """The second layer is used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, uses_both: bool) -> Tensor:
        for layer in self.layers[:1 + uses_both]:
            x = layer(x)
        return x.square().sum()
