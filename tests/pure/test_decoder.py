"""benchmarks/workloads/decoder.py: sizes, causality, positions, and FLOPs as torch counts them."""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.workloads import decoder
from benchmarks.workloads.decoder import Decoder, DecoderConfig

SMALL = DecoderConfig(layers=2, heads=2, width=8, vocab=16, context=6)


def small() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SMALL)


def test_sizes_match_the_names() -> None:
    for name, parameters in (
        # layers * (12 * width^2 + 2 norms * width) + norm + 2 * vocab * width
        ("decoder-tiny", 8 * (12 * 64**2 + 128) + 64 + 2 * 256 * 64),
        ("decoder-1.3b", 1_312_917_504),
    ):
        with torch.device("meta"):
            model = Decoder(decoder.DECODERS[name])
        assert sum(p.numel() for p in model.parameters()) == parameters


def test_attention_is_causal_and_depends_on_positions() -> None:
    model = small()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    output = model(tokens)[0]
    changed = model(torch.tensor([[1, 2, 3, 9, 5, 6]]))[0]
    same = torch.isclose(output, changed).all(dim=-1)
    assert same.tolist() == [True, True, True, False, False, False]
    swapped = model(torch.tensor([[2, 1, 3, 4, 5, 6]]))[0]
    assert not torch.allclose(output[-1], swapped[-1])


def test_stages_in_sequence_equal_the_model() -> None:
    whole, first, last = small(), small(), small()
    first.blocks, first.norm, first.head = first.blocks[:1], nn.Identity(), nn.Identity()
    last.tokens, last.blocks = nn.Identity(), last.blocks[1:]
    tokens = decoder.random_text(SMALL, 2, seed=0)[0]
    assert torch.equal(last(first(tokens)), whole(tokens))


def test_text_is_shifted_by_one_and_the_same_for_a_seed() -> None:
    tokens, targets = decoder.random_text(SMALL, 3, seed=1)
    assert tokens.shape == targets.shape == (3, 6)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, decoder.random_text(SMALL, 3, seed=1)[0])
    assert not torch.equal(tokens, decoder.random_text(SMALL, 3, seed=2)[0])


def test_flops_equal_those_that_torch_counts() -> None:
    model, (tokens, targets) = small(), decoder.random_text(SMALL, 3, seed=0)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        decoder.next_token_loss(model(tokens), targets).backward()
    # a batch of 3 texts of 6 tokens; the gradient of the embedding is not a matrix product
    assert counter.get_total_flops() == 18 * decoder.flops_per_token(SMALL)
