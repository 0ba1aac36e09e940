"""What is trained: a model, its batches, its loss; and the blocks that the model is made of."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision  # type: ignore[import-untyped]
from torch import nn

from common import torchbench
from common.decoder import PRESETS, Decoder, DecoderConfig, decoder_config

SEED = 0
TOYS = {"toy": (10000, 1000), "toy-small": (1000, 100)}  # wide and narrow layers
DECODER = "decoder-"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a workload; None takes the preset's, and torchbench's own batch size."""

    batch_size: int | None
    image_size: int
    sequence_length: int | None = None
    layers: int | None = None
    heads: int | None = None
    width: int | None = None
    vocab: int | None = None


@dataclass(frozen=True)
class Workload:
    """A model on the CPU (torchbench's: on the device), and how to make a batch and a loss."""

    model: nn.Module
    batch: Callable[[int], tuple[Any, ...]]  # of a number, on the device
    loss_of: Callable[..., torch.Tensor]  # (model, *batch) -> a scalar
    samples: int | None  # in a batch; None if torchbench does not tell
    tokens: int | None = None


class Layer(nn.Module):
    """The toy's block: [batch, inputs] -> [batch, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Toy(nn.Module):
    """Linear layers with ReLU between them. [batch, 10] -> [batch, 5].

    With 10000 and 1000 the toy model of PyTorch's benchmarks/dynamo/distributed.py.
    """

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        widths = [10, wide, wide, wide, *[narrow] * 8]
        self.layers = nn.ModuleList([Layer(a, b) for a, b in itertools.pairwise(widths)])
        self.last = nn.Linear(narrow, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.last(x)
        return logits


def model_names() -> list[str]:
    """What `create_workload` knows, but torchbench's."""
    decoders = [f"{DECODER}{preset}" for preset in PRESETS]
    return [*TOYS, *decoders, *torchvision.models.list_models(module=torchvision.models)]


def decoder_sizes(name: str, sizes: Sizes) -> DecoderConfig:
    """The decoder of this name. Raises ValueError for sizes that do not go together."""
    return decoder_config(
        name.removeprefix(DECODER),
        layers=sizes.layers,
        heads=sizes.heads,
        width=sizes.width,
        vocab=sizes.vocab,
        context=sizes.sequence_length,
    )


def create_workload(
    name: str, sizes: Sizes, device: torch.device, from_torchbench: bool = False
) -> Workload:
    """The same weights and batches on every rank, with all dropout off: losses can be compared.

    Raises ValueError where torchbench has no such model.
    """
    torch.manual_seed(SEED)
    if from_torchbench:
        loaded = torchbench.load(name, device, sizes.batch_size)
        _turn_off_dropout(loaded.module)
        same = (loaded.args, loaded.kwargs)
        return Workload(loaded.module, lambda number: same, _output_loss, loaded.batch_size)
    assert sizes.batch_size is not None
    if name.startswith(DECODER):
        config = decoder_sizes(name, sizes)
        batch = functools.partial(_text, config, sizes.batch_size, device)
        tokens = sizes.batch_size * config.context
        return Workload(Decoder(config), batch, cross_entropy, sizes.batch_size, tokens)
    model = Toy(*TOYS[name]) if name in TOYS else _torchvision_model(name, sizes.image_size)
    _turn_off_dropout(model)
    features = (10,) if name in TOYS else (3, sizes.image_size, sizes.image_size)
    classes = 5 if name in TOYS else 1000
    batch = functools.partial(_classified, (sizes.batch_size, *features), classes, device)
    return Workload(model, batch, cross_entropy, sizes.batch_size)


def _torchvision_model(name: str, image_size: int) -> nn.Module:
    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        options = {"image_size": image_size}
    elif name.startswith("maxvit"):
        options = {"input_size": (image_size, image_size)}
    elif name in ("googlenet", "inception_v3"):  # their second head would need a second loss
        options = {"aux_logits": False, "init_weights": True}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return model


def _text(
    config: DecoderConfig, batch_size: int, device: torch.device, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the ones that follow them, [batch, context] each."""
    source = torch.Generator().manual_seed(SEED + 1 + number)
    text = torch.randint(config.vocab, (batch_size, config.context + 1), generator=source)
    return text[:, :-1].contiguous().to(device), text[:, 1:].contiguous().to(device)


def _classified(
    shape: tuple[int, ...], classes: int, device: torch.device, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(SEED + 1 + number)
    x = torch.rand(shape, generator=source)
    return x.to(device), torch.randint(classes, shape[:1], generator=source).to(device)


def cross_entropy(model: nn.Module, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all targets. The model's logits: [..., classes]; targets: [...]."""
    logits = model(x).flatten(0, -2)
    return F.cross_entropy(logits.float(), targets.flatten())


def _output_loss(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
    return torchbench.scalar_loss(model(*inputs, **named))


def _turn_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd | torchvision.ops.StochasticDepth):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks, outermost first: what FSDP shards and checkpoints one by one.

    A block's class is the model's own, not one of torch.nn, and has at least two instances with
    parameters. A model without such a class (VGG, say) is cut at its repeated layers.
    """
    with_parameters = [m for m in model.modules() if next(m.parameters(), None) is not None]
    counts = Counter(type(module) for module in with_parameters if module is not model)
    repeated = {cls for cls, count in counts.items() if count > 1}
    own = {cls for cls in repeated if not cls.__module__.startswith("torch.nn.")}
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    layers = {cls for cls in repeated - own if not issubclass(cls, containers)}

    def outermost(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if type(child) in (own or layers):
                yield child
            else:
                yield from outermost(child)

    return list(outermost(model))


def describe_sizes(name: str, sizes: Sizes) -> dict[str, int]:
    """The sizes that matter to a model, as its case's key has them."""
    if name.startswith(DECODER):
        return dataclasses.asdict(decoder_sizes(name, sizes))
    return {} if name in TOYS else {"image_size": sizes.image_size}
