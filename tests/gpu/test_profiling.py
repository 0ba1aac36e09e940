"""common/trace.py on a CUDA device."""

import pytest
import torch
from torch.profiler import record_function

from common.decoder import Decoder, decoder_config
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
