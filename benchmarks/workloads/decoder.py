"""A decoder-only transformer in plain torch: the language model of the training benchmarks.

It uses RMSNorm and rotary position embeddings, and neither biases nor dropout. axes.py applies
parallelism from outside:

    tensor, sequence   attention.{q,k,v,o}, mlp.{up,down} and the norms are sharded; attention
                       infers the number of local heads from the width of q, k and v
    pipeline           model.blocks = model.blocks[2:4]; tokens, norm, head become nn.Identity()
    context            attention.attend is replaced; model.rotation keeps the rank's positions
    expert             each rank keeps some of the middle block's experts; Experts.compute is
                       replaced
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    layers: int
    heads: int
    width: int  # of the residual stream; the width of a head, width / heads, must be even
    vocab: int
    context: int  # maximum sequence length in tokens
    experts: int = 0  # number of experts that replace the middle block's MLP; 0 keeps the MLP


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of weights
# decoder-124m and -1.3b have the layers, widths and parameter counts of GPT-2 small and GPT-3 XL,
# with half of GPT-2's vocabulary and a head that is not tied to the embedding, because pipeline
# stages cannot share weights.
DECODERS = {
    "decoder-nano": DecoderConfig(layers=4, heads=8, width=64, vocab=256, context=64),
    "decoder-tiny": DecoderConfig(layers=8, heads=8, width=64, vocab=256, context=128),
    "decoder-10m": DecoderConfig(layers=8, heads=8, width=320, vocab=256, context=256),
    "decoder-124m": DecoderConfig(layers=12, heads=12, width=768, vocab=25600, context=1024),
    "decoder-1.3b": DecoderConfig(layers=24, heads=16, width=2048, vocab=25600, context=2048),
    # layers, heads, widths and vocabulary of Llama 2 7B and 70B; with these MLPs they have 6.7 and
    # 65 billion parameters
    "decoder-7b": DecoderConfig(layers=32, heads=32, width=4096, vocab=32000, context=4096),
    "decoder-70b": DecoderConfig(layers=80, heads=64, width=8192, vocab=32000, context=4096),
}


class Attention(nn.Module):
    """Causal self-attention. [batch, sequence, width] -> the same."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q = rotate(self.split_heads(self.q(x)), rotation)
        k = rotate(self.split_heads(self.k(x)), rotation)
        v = self.split_heads(self.v(x))
        y = self.attend(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> [batch, local heads, sequence, head width]."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    """[batch, sequence, width] -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """MLPs to which tokens are routed by position. [batch, sequence, width] -> the same.

    The expert of each position is drawn once; the k-th expert has 1/k of the probability of the
    first. The experts therefore have different loads, which do not depend on the mesh.
    """

    expert: Tensor  # by position, [context]

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.count = config.experts
        self.mlps = nn.ModuleList(MLP(config.width) for _ in range(self.count))
        popularity = 1 / torch.arange(1, self.count + 1, device="cpu")  # Zipf
        # drawn on the CPU from a fixed seed, so that it is equal on all devices, meta included
        seed = torch.Generator().manual_seed(0)
        drawn = torch.multinomial(popularity, config.context, replacement=True, generator=seed)
        device = torch.get_default_device()
        self.register_buffer("expert", drawn.to(device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        expert = self.expert.repeat(len(x))
        order = expert.argsort(stable=True)
        y = self.compute(x.flatten(0, 1)[order], expert.bincount(minlength=self.count))
        return y[order.argsort()].view_as(x)

    def compute(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """tokens: [..., n, width], sorted by expert. counts: number of tokens by expert."""
        parts = tokens.split(counts.tolist(), dim=-2)
        outputs = [mlp(part) for mlp, part in zip(self.mlps, parts, strict=True)]
        return torch.cat(outputs, dim=-2)


class Block(nn.Module):
    """Attention, then an MLP, each with pre-normalization and a residual connection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head. Tokens [batch, sequence] int64 -> logits [..., vocab]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens: nn.Module = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        if config.experts:
            self.blocks[config.layers // 2].mlp = Experts(config)
        self.norm: nn.Module = nn.RMSNorm(config.width)
        self.head: nn.Module = nn.Linear(config.width, config.vocab, bias=False)
        # [context, head width]: cosines, then sines (Su et al. 2021, arXiv 2104.09864)
        pairs = config.width // config.heads // 2
        speeds = 10000.0 ** -(torch.arange(pairs) / pairs)
        angles = torch.outer(torch.arange(config.context), speeds)
        rotation = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.register_buffer("rotation", rotation, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x, self.rotation)
        return self.head(self.norm(x))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of x [batch, heads, sequence, head width] by the angle of its position."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = rotation[: x.shape[-2]].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits [batch, sequence, vocab] and targets [batch, sequence]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def random_text(config: DecoderConfig, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens and their targets, the next tokens: two tensors [batch, context] on the CPU."""
    source = torch.Generator().manual_seed(seed)
    text = torch.randint(config.vocab, (batch_size, config.context + 1), generator=source)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def flops_per_token(config: DecoderConfig) -> int:
    """Return the FLOPs of forward and backward per token, for sequences of `context` tokens (PaLM,
    arXiv 2204.02311, appendix B)."""
    # 6 per weight of a matrix product; attention counts in full, although it is causal
    weights = config.layers * 12 * config.width**2 + config.vocab * config.width
    return 6 * weights + 12 * config.layers * config.width * config.context
