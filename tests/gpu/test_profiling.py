"""common/trace.py, common/peaks.py on a CUDA device."""

import pytest
import torch
from torch.profiler import record_function

from common.decoder import Decoder, decoder_config
from common.peaks import count_flops, peak_flops
from common.trace import profile_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def test_kernels_are_found_in_the_ranges_that_launched_them() -> None:
    device = torch.device("cuda", 0)
    model = Decoder(decoder_config("10m", layers=2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(256, (8, 256), device=device)

    def step() -> None:
        with record_function("Forward"):
            loss = model(tokens).float().square().mean()
        with record_function("Backward"):
            loss.backward()
        with record_function("Optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    step()
    summary = profile_steps(step, 3, device)
    assert 0 < summary["compute_s"] <= summary["step_s"]
    assert summary["communication_s"] == summary["overlapped_s"] == 0
    device_s = summary["ranges_device_s"]
    assert all(device_s[name] > 0 for name in ("Forward", "Backward", "Optimizer")), summary
    # one stream: no kernel counts in two ranges
    assert sum(device_s.values()) == pytest.approx(summary["compute_s"], rel=0.01)


def test_the_model_computes_no_faster_than_the_peak() -> None:
    """bf16 products as large as they get: a wrong peak or count shows as more than 100 %."""
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    peak = peak_flops(properties.name, "bf16", properties.multi_processor_count)
    if peak is None:
        pytest.skip(f"the peak of {properties.name} is not known")
    model = torch.nn.Linear(8192, 8192, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(x)
        return output.sum()

    flops = count_flops(model, [x], loss_of)
    assert flops == 2 * 2 * 8192**3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(13):
        if i == 3:
            start.record()
        loss_of(model, x).backward()
    end.record()
    torch.cuda.synchronize()
    assert flops * 10 / (start.elapsed_time(end) / 1e3) < 1.02 * peak
