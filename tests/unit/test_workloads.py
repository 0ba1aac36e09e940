"""common/workloads.py."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from common.workloads import Sizes, blocks_of, create_workload, describe_sizes, model_names

CPU = torch.device("cpu")
TINY = Sizes(2, 32, sequence_length=8, layers=2, heads=2, width=16, vocab=50)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("toy-small", {"Layer": 11}),
        ("decoder-10m", {"Block": 2}),
        ("resnet18", {"BasicBlock": 8}),
        ("resnet50", {"Bottleneck": 16}),
        ("vit_b_16", {"EncoderBlock": 12}),
        ("densenet121", {"_DenseBlock": 4, "_Transition": 3}),
        ("swin_t", {"SwinTransformerBlock": 12, "PatchMerging": 3}),
        ("vgg11", {"Conv2d": 8, "Linear": 3}),
    ],
)
def test_blocks(name: str, blocks: dict[str, int]) -> None:
    with torch.device("meta"):
        model = create_workload(name, TINY, CPU).model
    found = blocks_of(model)
    assert Counter(type(block).__name__ for block in found) == blocks
    inside = [inner for block in found for inner in block.modules()]
    assert len(inside) == len(set(inside)), "a block within a block"


def test_a_model_without_repetition_has_no_blocks() -> None:
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_the_original_toy() -> None:
    with torch.device("meta"):
        model = create_workload("toy", TINY, CPU).model
    shapes = [tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")]
    widths = [10, 10000, 10000, 10000, *[1000] * 8, 5]
    assert shapes == [(b, a) for a, b in itertools.pairwise(widths)]


@pytest.mark.parametrize("name", ["toy-small", "decoder-10m", "mobilenet_v3_small"])
def test_the_same_on_every_rank_but_for_the_batch(name: str) -> None:
    one, two = (create_workload(name, TINY, CPU) for _ in range(2))
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(one.batch(1), two.batch(1), strict=True))
    assert not torch.equal(one.batch(0)[0], one.batch(1)[0])
    loss = one.loss_of(one.model, *one.batch(0))
    assert loss.dtype == torch.float32
    assert torch.equal(loss, two.loss_of(two.model, *two.batch(0))), "dropout is on"


def test_the_next_token_is_the_target() -> None:
    work = create_workload("decoder-10m", TINY, CPU)
    tokens, targets = work.batch(0)
    assert tokens.shape == targets.shape == (2, 8)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert (work.samples, work.tokens) == (2, 16)


def test_the_key_has_the_sizes_that_matter() -> None:
    assert describe_sizes("toy", TINY) == {}
    assert describe_sizes("resnet18", TINY) == {"image_size": 32}
    assert describe_sizes("decoder-10m", TINY)["context"] == 8
    assert {"toy", "toy-small", "decoder-124m", "resnet50"} <= set(model_names())
