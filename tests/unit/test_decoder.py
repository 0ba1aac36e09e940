"""common/decoder.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.decoder import PRESETS, Block, Decoder, DecoderConfig, decoder_config

TINY = DecoderConfig(layers=2, heads=2, width=8, vocab=11, context=6)


def parameters(config: DecoderConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(config).parameters())


def test_parameters_by_hand() -> None:
    """A block: two norms of 2w, qkv 3w^2 + 3w, out w^2 + w, MLP 4w^2 + 4w and 4w^2 + w."""
    block = 12 * 8 * 8 + 13 * 8
    assert sum(p.numel() for p in Block(TINY).parameters()) == block == 872
    assert parameters(TINY) == 11 * 8 + 6 * 8 + 2 * 872 + 2 * 8 == 1896
    assert parameters(decoder_config("124m", tied=False)) == 124_439_808 + 50257 * 768


@pytest.mark.parametrize(
    ("preset", "count"),
    [("10m", 10_844_160), ("124m", 124_439_808), ("1.3b", 1_315_723_264)],
)
def test_presets(preset: str, count: int) -> None:
    config = PRESETS[preset]
    w, vocab, context = config.width, config.vocab, config.context
    by_formula = config.layers * (12 * w * w + 13 * w) + (vocab + context + 2) * w
    assert parameters(config) == by_formula == count


def test_sizes_replace_the_preset() -> None:
    config = decoder_config("10m", layers=2, vocab=None, tied=False)
    assert config == DecoderConfig(2, 6, 384, 256, 256, tied=False)


@pytest.mark.parametrize(
    ("preset", "sizes", "message"),
    [
        ("124M ", {}, "unknown decoder '124M '; did you mean 124m"),
        ("huge", {}, "unknown decoder 'huge'; choose from 10m, 124m, 1.3b"),
        ("10m", {"heads": 5}, "width 384 and 5 heads; e.g. width 320"),
        ("10m", {"layers": 0}, "expected at least 1 for the decoder's layers, got 0"),
    ],
)
def test_bad_sizes(preset: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=r"decoder|width") as caught:
        decoder_config(preset, **sizes)
    assert message in str(caught.value)


def test_later_tokens_do_not_reach_back() -> None:
    torch.manual_seed(0)
    model = Decoder(TINY)
    tokens = torch.randint(11, (3, 6))
    changed = tokens.clone()
    changed[:, 4] = (tokens[:, 4] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 6, 11)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(256, (2, 65))
    logits = Decoder(decoder_config("10m", layers=2))(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(float(loss.detach()) - math.log(256)) < 0.2


def test_a_block_computes_what_torchs_own_layer_does() -> None:
    torch.manual_seed(0)
    block = Block(TINY)
    theirs = nn.TransformerEncoderLayer(
        8, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    pairs = {
        theirs.self_attn.out_proj: block.attention_out,
        theirs.linear1: block.mlp_in,
        theirs.linear2: block.mlp_out,
        theirs.norm1: block.attention_norm,
        theirs.norm2: block.mlp_norm,
    }
    for to, of in pairs.items():
        to.load_state_dict(of.state_dict())
    theirs.self_attn.load_state_dict(
        {"in_proj_weight": block.qkv.weight, "in_proj_bias": block.qkv.bias}, strict=False
    )
    x = torch.randn(3, 6, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    torch.testing.assert_close(block(x), theirs(x, src_mask=mask, is_causal=True))


def test_one_graph_and_the_same_gradients_when_compiled() -> None:
    torch.manual_seed(0)
    model = Decoder(TINY)
    tokens = torch.randint(11, (3, 6))
    model(tokens).square().sum().backward()
    eager = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(tokens).square().sum().backward()
    assert len(eager) == len(list(model.parameters()))
    for parameter, want in zip(model.parameters(), eager, strict=True):
        torch.testing.assert_close(parameter.grad, want)
