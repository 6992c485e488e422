"""What a self-critical step does on a device: the largest kernels and CPU operations, and how long
the CPU waits.

    python -m benchmarks.profile_step [--device cuda] [--precision bf16] [--json FILE]

The step of ``benchmarks.scst_step`` (50 images), ten times under torch.profiler after two that warm
up. Times are of one step. ``GPU busy`` is the sum over kernels, which one stream runs one after
another; for the rest of the elapsed time the GPU waits for the CPU.
"""

import time
from collections.abc import Iterator
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Measurement, Timing, command, synchronise
from benchmarks.scst_step import SIZES, build_bench, in_turn, shapes_of

STEPS, LARGEST = 10, 30
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpyAsync",
    "aten::item",
)
"""Operations of the CPU that wait for the GPU; a copy to pinned memory does not."""


def measure(timing: Timing, precision: str = "bf16", **sizes: Any) -> Iterator[Measurement]:
    """Elapsed and busy time of a step, then the largest operations of the CPU and of the device."""
    shapes = shapes_of(timing, **sizes)
    bench = build_bench(shapes, timing.device, precision)
    on_gpu = timing.device.startswith("cuda")
    step = in_turn(bench, bench.batch)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    for _ in range(2):
        step()
    synchronise(timing.device)
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    synchronise(timing.device)
    elapsed = (time.perf_counter() - started) / STEPS
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
        synchronise(timing.device)
    events = profiler.key_averages()
    rows = {
        "CPU": [
            (e.key, e.self_cpu_time_total, e.count)
            for e in events
            if e.device_type == DeviceType.CPU
        ],
        "GPU": [
            (e.key, e.self_device_time_total, e.count)
            for e in events
            if e.device_type == DeviceType.CUDA
        ],
    }
    whole = f"one step, {shapes.images} images, {precision}"
    for device, operations in rows.items():
        seconds = sum(microseconds for _, microseconds, _ in operations) / STEPS / 1e6
        calls = sum(count for *_, count in operations) / STEPS
        detail = f"{seconds:.4g} s of {elapsed:.4g} s without the profiler, {calls:,.0f} operations"
        yield Measurement(f"{device} busy", whole, seconds / elapsed, "of the time", detail)
    waits = [row for row in rows["CPU"] if row[0] in WAITS]
    largest = [
        sorted(operations, key=lambda row: -row[1])[:LARGEST] for operations in rows.values()
    ]
    for device, operations in zip(("CPU waits", "CPU", "GPU"), (waits, *largest), strict=True):
        for name, microseconds, count in operations:
            seconds = microseconds / STEPS / 1e6
            detail = f"{seconds * 1e3:.4g} ms in {count / STEPS:,.1f} calls"
            yield Measurement(
                f"{device}: {name[:120]}", whole, seconds / elapsed, "of the time", detail
            )


if __name__ == "__main__":
    command(__doc__, measure, **SIZES, temperature=1.0, precision="bf16")
