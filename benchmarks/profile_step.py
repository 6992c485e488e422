"""Profile of a self-critical step on a device: the largest kernels and CPU operations,
and how long the CPU waits.

    python -m benchmarks.profile_step [--device cuda] [--precision bf16] [--json FILE]

The step of ``benchmarks.scst_step`` (50 images), ten times under torch.profiler after
two that warm up. Times are of one step. ``GPU busy`` is the sum over kernels, which one
stream runs one after another; for the rest of the elapsed time the GPU waits for the
CPU.
"""

import time
from collections.abc import Iterator
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Measurement, Timing, command, synchronise
from benchmarks.scst_step import SIZES, build_bench, in_turn, shapes_of

STEPS = 10
LARGEST = 30
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpyAsync",
    "aten::item",
)
"""Operations of the CPU that wait for the GPU; a copy to pinned memory does not."""


def measure(
    timing: Timing, precision: str = "bf16", **sizes: Any
) -> Iterator[Measurement]:
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
    whole = f"one step, {shapes.images} images, {precision}"
    events = profiler.key_averages()
    groups = {
        "CPU": [event for event in events if event.device_type == DeviceType.CPU],
        "GPU": [event for event in events if event.device_type == DeviceType.CUDA],
    }
    groups["CPU waits"] = [event for event in groups["CPU"] if event.key in WAITS]
    for name, group in groups.items():
        seconds = [own_seconds(event) for event in group]
        calls = sum(event.count for event in group) / STEPS
        detail = f"{sum(seconds):.4g} s of {elapsed:.4g} s without the profiler, {calls:,.0f} calls"
        yield Measurement(
            f"{name} busy", whole, sum(seconds) / elapsed, "of the time", detail
        )
        for event in sorted(group, key=own_seconds, reverse=True)[:LARGEST]:
            ratio = own_seconds(event) / elapsed
            detail = (
                f"{own_seconds(event) * 1e3:.4g} ms in {event.count / STEPS:,.1f} calls"
            )
            yield Measurement(
                f"{name}: {event.key[:120]}", whole, ratio, "of the time", detail
            )


def own_seconds(event: Any) -> float:
    """Seconds of an operation in one step, without the operations that it calls."""
    on_gpu = event.device_type == DeviceType.CUDA
    return (
        (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        / STEPS
        / 1e6
    )


if __name__ == "__main__":
    command(__doc__, measure, **SIZES, temperature=1.0, precision="bf16")
