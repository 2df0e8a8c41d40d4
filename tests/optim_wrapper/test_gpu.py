"""What the stand-in device of test_device_reader.py shows, on a real GPU."""

from __future__ import annotations

import pytest
import torch

from lastwords.optim_wrapper.capture.source import BUFFER_BYTES, DeviceReader
from lastwords.optim_wrapper.device_fence import device_fence
from lastwords.optim_wrapper.streams.rng_streams import DeviceStream, default_streams

pytestmark = pytest.mark.gpu

BUSY_CYCLES = 4_000_000_000


@pytest.fixture
def device() -> torch.device:
    torch.cuda.init()
    return torch.device("cuda", 0)


@pytest.mark.parametrize("numel", [1, BUFFER_BYTES // 4 - 1, 3 * BUFFER_BYTES // 4 + 5])
def test_the_reader_waits_for_no_other_stream(device: torch.device, numel: int) -> None:
    tensor = torch.arange(numel, device=device, dtype=torch.float32)
    turned = torch.arange(12, device=device).view(3, 4).t()
    reader = DeviceReader([device])
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    try:
        assert bytes(reader(tensor)) == torch.arange(numel, dtype=torch.float32).numpy().tobytes()
        assert bytes(reader(turned)) == torch.arange(12).view(3, 4).t().contiguous().numpy().tobytes()
        assert not torch.cuda.current_stream().query(), "the device was busy all the time"
    finally:
        torch.cuda.synchronize()


def test_the_fence_waits_for_the_current_stream(device: torch.device) -> None:
    parameter = torch.zeros(8, device=device, requires_grad=True)
    fence = device_fence([torch.optim.SGD([parameter], 0.1)])
    assert fence is not None
    torch.cuda._sleep(BUSY_CYCLES // 4)
    assert not torch.cuda.current_stream().query()
    fence()
    assert torch.cuda.current_stream().query()


def test_the_devices_random_stream_is_taken_while_the_device_is_busy_and_put_back(device: torch.device) -> None:
    (stream,) = (one for one in default_streams() if isinstance(one, DeviceStream))
    kept = bytearray(stream.region.nbytes)
    take = stream.into(memoryview(kept))
    torch.cuda._sleep(BUSY_CYCLES)
    take()
    waited = torch.cuda.current_stream().query()
    expected = torch.rand(5, device=device)
    stream.restore(kept)
    assert torch.equal(torch.rand(5, device=device), expected)
    assert not waited
