"""common/peaks.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.decoder import Decoder, DecoderConfig, decoder_config
from common.peaks import DTYPES, PEAKS, count_flops, fp32_on_cuda, peak_flops

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        (H100, "bf16", 989.4),
        (H100, "tf32", 494.7),
        (H100, "fp32", 66.9),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp16", 989.5),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA L4", "bf16", 121),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI250X", "bf16", 191.5),
    ],
)
def test_known_peaks(name: str, dtype: str, tflops: float) -> None:
    assert peak_flops(name, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "NVIDIA H100",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A10G",
        "GRID A100X-40C",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI250X / MI250",
    ],
)
def test_other_names_are_not_known(name: str) -> None:
    assert [peak_flops(name, dtype) for dtype in DTYPES] == [None] * 4


def test_what_a_device_has_not() -> None:
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("Tesla T4", "tf32") is None


def test_a_partition_with_the_name_of_the_whole() -> None:
    assert peak_flops("AMD Instinct MI300X", "bf16", 304) == 1307.4e12
    assert peak_flops("AMD Instinct MI300X", "bf16", 38) is None
    assert peak_flops("AMD Instinct MI300X", "bf16") is None


@pytest.mark.parametrize("name", PEAKS)
def test_rows_are_in_themselves_right(name: str) -> None:
    """bf16 and fp16 alike, twice tf32 (but for rounding), all above fp32, and a source."""
    peak = PEAKS[name]
    assert peak.source
    assert peak.fp32 < peak.fp16
    if peak.tf32 is not None and peak.bf16 is not None:
        assert peak.bf16 == peak.fp16
        assert peak.bf16 / peak.tf32 == pytest.approx(2, rel=0.03)
        assert peak.tf32 >= peak.fp32


def test_where_fp32_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    linear, conv = nn.Linear(2, 2), nn.Sequential(nn.Conv2d(3, 2, 1), nn.Linear(2, 2))
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32
    assert fp32_on_cuda(linear, H100) == "fp32"
    assert fp32_on_cuda(conv, H100) == "tf32"
    assert fp32_on_cuda(conv, "Tesla T4") == "fp32"
    assert fp32_on_cuda(conv, "AMD Instinct MI300X") == "fp32"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert fp32_on_cuda(conv, H100) == "fp32"
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    torch.set_float32_matmul_precision("high")
    try:
        assert fp32_on_cuda(linear, H100) == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


def mean_of(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(*inputs)
    return output.mean()


def test_flops_of_a_linear_layer() -> None:
    """[5, 3] x [3, 2]: 2 * 5 * 3 * 2 forward, as many for the weight's gradient.

    The gradient of the input, as many again, is computed only where one is wanted.
    """
    model = nn.Linear(3, 2)
    assert count_flops(model, [torch.ones(5, 3)], mean_of) == 2 * 60
    assert count_flops(nn.Sequential(model, nn.Linear(2, 1)), [torch.ones(5, 3)], mean_of) == (
        2 * 60 + 3 * 2 * 5 * 2 * 1
    )


def cross_entropy(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_the_decoder(tied: bool) -> None:
    """6 N tokens + 12 layers width sequence tokens: PaLM (arXiv 2204.02311), appendix B.

    N: the weights of matrix products (Kaplan et al., arXiv 2001.08361, section 2.1), here 12 w^2
    a layer and the head's; embeddings and biases multiply nothing.
    """
    config = DecoderConfig(layers=2, heads=2, width=8, vocab=11, context=6, tied=tied)
    tokens = torch.zeros(3, 6, dtype=torch.long)
    weights = 2 * 12 * 8 * 8 + 11 * 8
    expected = 6 * weights * 18 + 12 * 2 * 8 * 6 * 18
    assert count_flops(Decoder(config), [tokens, tokens], cross_entropy) == expected == 196_128


def test_counting_needs_no_memory_and_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flops = count_flops(model, [torch.zeros(2, 3, 5, 5)], mean_of)
    assert flops == 2 * 2 * (2 * 3 * 3 * 3 * 4 * 3 * 3)  # 3 x 3 places; forward, weight's gradient
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    with torch.device("meta"):
        large = Decoder(decoder_config("1.3b"))
        tokens = torch.zeros(8, 2048, dtype=torch.long)
    n = 24 * 12 * 2048**2 + 50257 * 2048
    by_formula = 6 * n * 8 * 2048 + 12 * 24 * 2048 * 2048 * 8 * 2048
    assert count_flops(large, [tokens, tokens], cross_entropy) == by_formula
