"""Models for `--model tests.own_models:NAME`, with features of two libraries: transformers (the
output is an object, the head shares the weight of the embedding) and torchtitan (a dict of
layers)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


@dataclass
class Output:
    logits: Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(self.norm(x)).relu()))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleDict({str(number): Block() for number in range(3)})

    def forward(self, tokens: Tensor) -> Output:
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return Output(self.head(x))


def gpt(device: torch.device) -> Any:
    model = GPT().to(device)
    text = torch.randint(32, (6, 9), device=device)  # the batch of a rank
    tokens, targets = text[:, :-1], text[:, 1:]
    return model, (tokens,), lambda out: cross_entropy(out.logits.flatten(0, 1), targets.flatten())


def idle(device: torch.device) -> Any:
    """The last layer does not contribute to the loss."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.forward = model[0].forward  # type: ignore[method-assign]
    return model.to(device), (torch.rand(3, 4, device=device),), torch.sum


def noisy(device: torch.device) -> Any:
    """The model draws random numbers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    return model.to(device), (torch.rand(3, 4, device=device),), torch.mean


def centered(device: torch.device) -> Any:
    """The loss depends on a moving average of the outputs, as in DINO."""

    class Model(nn.Linear):
        center: Tensor

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.center.lerp_(y.detach().mean(0), 0.1)
            return (y - self.center).square()

    model = Model(4, 4)
    model.register_buffer("center", torch.zeros(4))
    return model.to(device), (torch.rand(3, 4, device=device),), torch.mean


def vector(device: torch.device) -> Any:
    return nn.Linear(4, 4).to(device), (torch.rand(3, 4, device=device),), torch.relu


def model_alone(device: torch.device) -> Any:
    return nn.Linear(4, 4)


def too_large(device: torch.device) -> Any:
    """16 TiB, too large for any GPU."""
    return nn.Linear(2**21, 2**21, device=device), (torch.ones(2, 4),), torch.sum


def batch_of_transformers(device: torch.device, batch: int = 2, long: bool = False) -> Any:
    """Keyword arguments, as a tokenizer and a data collator return them: nested, with a flag."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)

        def forward(self, input_ids: Tensor, extra: dict[str, Any], use_cache: bool) -> Any:
            assert not use_cache
            return {"loss": (self.embedding(input_ids) * extra["masks"][0]).mean()}

    tokens = torch.zeros(batch, 5 if long else 3, dtype=torch.long, device=device)
    masks = {"masks": [torch.ones(batch, 1, 1, device=device)]}
    inputs = {"input_ids": tokens, "extra": masks, "use_cache": False}
    return Model().to(device), inputs, lambda output: output["loss"]


def everything(device: torch.device) -> Any:
    """A dict with an optimizer and FSDP units."""
    inner = nn.Linear(4, 1, bias=False)
    outer = nn.Sequential(inner)
    return {
        "model": nn.Sequential(outer).to(device),
        "args": (torch.ones(3, 4, device=device),),
        "loss": torch.sum,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        "fsdp_units": [outer, inner],
    }


def diverges(device: torch.device) -> Any:
    """The loss is infinite from the first step on."""
    model = nn.Linear(4, 1).to(device)
    return model, (torch.ones(3, 4, device=device),), lambda output: output.sum() * float("inf")


def in_bf16(device: torch.device) -> Any:
    """Parameters and gradients are bf16."""
    model = nn.Linear(4, 4).to(device, torch.bfloat16)
    return model, (torch.ones(3, 4, dtype=torch.bfloat16, device=device),), torch.mean
