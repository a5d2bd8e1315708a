"""How fast this device's memory is: a copy too large for any cache."""

from typing import TYPE_CHECKING

from paceline.core.clock import Clock

if TYPE_CHECKING:
    import torch

CPU_BYTES = 1 << 28
GPU_BYTES = 1 << 32
REPEATS = 5


def copy_bandwidth(device: "torch.device", clock: Clock, num_bytes: int | None = None) -> float:
    """Bytes per second, read and written together, of the fastest of a few copies."""
    import torch

    on_gpu = device.type == "cuda"
    source = torch.zeros(num_bytes or (GPU_BYTES if on_gpu else CPU_BYTES), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS + 1):  # the first touches every page
        before = clock.now()
        target.copy_(source)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(clock.now() - before)
    return 2 * source.nbytes / min(seconds[1:])
