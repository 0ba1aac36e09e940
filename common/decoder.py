"""A GPT-style decoder in plain torch: the language model of the training benchmarks.

Pre-norm blocks of causal self-attention and an MLP, learned positions, the output head tied to the
token embedding: the architecture of GPT-2 (Radford et al. 2019), without dropout.
"""

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from common.cli import suggest


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a decoder. Raises ValueError where they do not go together."""

    layers: int
    heads: int
    width: int  # of the residual stream; a head has width / heads of it
    vocab: int
    context: int  # the longest sequence, in tokens
    tied: bool = True  # the output head shares the token embedding's weight

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "vocab", "context"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"expected at least 1 for the decoder's {name}, got {getattr(self, name)}"
                )
        if self.width % self.heads:
            raise ValueError(
                f"expected a width that the heads divide, got width {self.width} and "
                f"{self.heads} heads; e.g. width {self.heads * 64}"
            )


PRESETS = {
    "10m": DecoderConfig(layers=6, heads=6, width=384, vocab=256, context=256),
    "124m": DecoderConfig(layers=12, heads=12, width=768, vocab=50257, context=1024),  # GPT-2 small
    "1.3b": DecoderConfig(layers=24, heads=16, width=2048, vocab=50257, context=2048),
}


def decoder_config(preset: str, **sizes: int | bool | None) -> DecoderConfig:
    """A preset, with some of its fields replaced; None keeps the preset's.

    Raises ValueError for an unknown preset and for sizes that do not go together.
    """
    if preset not in PRESETS:
        hint = suggest(preset, PRESETS) or f"; choose from {', '.join(PRESETS)}"
        raise ValueError(f"unknown decoder '{preset}'{hint}")
    given = {name: size for name, size in sizes.items() if size is not None}
    return dataclasses.replace(PRESETS[preset], **given)  # type: ignore[arg-type]


class Block(nn.Module):
    """Self-attention, then an MLP, each on a normalised copy and added to the stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        out: torch.Tensor = x + self.mlp_out(hidden)
        return out

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Each token attends to itself and to those before it. [batch, sequence, width]."""
        batch, sequence, width = x.shape
        # [batch, sequence, 3 * width] -> three of [batch, heads, sequence, width / heads]
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.attention_out(y.transpose(1, 2).reshape(batch, sequence, width))
        return out


class Decoder(nn.Module):
    """Token and position embeddings, the blocks, a norm, the head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's: N(0, 0.02), and less for what is added to the stream 2 * layers times."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(("attention_out", "mlp_out"))
                scale = (2 * self.config.layers) ** -0.5 if residual else 1.0
                nn.init.normal_(module.weight, std=0.02 * scale)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of each next token. [batch, sequence] int64 -> [batch, sequence, vocab].

        The sequence is at most `context` long.
        """
        sequence = tokens.shape[1]
        assert sequence <= self.config.context, f"{sequence} tokens, context {self.config.context}"
        x = self.tokens(tokens) + self.positions(torch.arange(sequence, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
