"""Bytes that each engine holds for a parameter, counted on processes of this machine's CPU (gloo).

    python -m benchmarks.engine_memory [--processes 2] [--engines plain zero1 ...] [--json FILE]

A captioner from scratch takes two steps as trainings take them. In the second one the storages of all tensors that the
process holds are added up, each once, at four moments, and divided by the number of parameters; DDP's buckets, which
Python sees only where gradients are views of them, are what DDP reports. Inputs and activations are gone at these
moments or do not count beside the weights. Precision is float32; mixed precision by ``train.mixed_precision`` keeps
weights, gradients and moments so.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

ENGINES = ("plain", "zero1", "zero2", "zero3", "fsdp2")
MOMENTS = ("between steps", "while sampling", "between micro-batches", "before the update")
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def environment(engine: str) -> dict[str, str]:
    """What ``accelerate launch`` says to its processes with the configuration file of the engine."""
    if engine == "plain":
        return {}
    if engine == "fsdp2":
        return FSDP
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": engine[-1],
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def launched(rank: int, processes: int, port: int) -> dict[str, str]:
    """What a launcher tells one of its processes on this machine."""
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    numbers = dict.fromkeys(names[0], str(rank)) | dict.fromkeys(names[1], str(processes))
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **numbers}


def held(model: Any) -> int:
    """Bytes of the storages of all tensors of this process, gradients among them, and of DDP's buckets."""
    gc.collect()
    kinds = (
        item for item in gc.get_objects() if issubclass(type(item), Tensor) and not issubclass(type(item), DTensor)
    )
    tensors: list[Tensor] = list(kinds)
    # Python sees a gradient once it has asked for it.
    tensors += [leaf.grad for leaf in tensors if leaf.is_leaf and leaf.requires_grad and leaf.grad is not None]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    storages.pop(0, None)  # what FSDP has freed
    buckets = bucket_sizes(model)
    # Python sees a bucket through gradients that are, or were, views of it.
    seen = {view.untyped_storage().data_ptr() for view in tensors if view._is_view()}
    for place in seen & storages.keys():
        if storages[place] in buckets:
            del storages[place]
    return sum(storages.values()) + sum(buckets)


def bucket_sizes(model: Any) -> list[int]:
    """Bytes of each of DDP's buckets, together as large as all gradients; none without DDP."""
    report = model._get_ddp_logging_data() if hasattr(model, "_get_ddp_logging_data") else {}
    sizes = report.get("rebuilt_bucket_sizes") or report.get("bucket_sizes")
    return [int(size) for size in str(sizes).split(",")] if sizes else []


def measure(rank: int, processes: int, engine: str, port: int, queue: Any) -> None:
    """One process: put the bytes a parameter at each moment, and the number of parameters, into ``queue``."""
    if processes > 1 or engine != "plain":  # a launcher; without one there is no DDP
        os.environ.update(environment(engine) | launched(rank, processes, port))
    from rl_caption.build import build_accelerator
    from rl_caption.captioners.configuration import CaptionTransformerConfig
    from rl_caption.captioners.modeling import CaptionTransformer
    from rl_caption.config import RunConfig, TrainConfig
    from rl_caption.engines import deepspeed_step, engine_of, fill_deepspeed_config, prepare, whole_weights
    from rl_caption.training.accumulation import backward_all

    accelerator = build_accelerator(TrainConfig(threads=1), RunConfig())
    if engine.startswith("zero"):
        fill_deepspeed_config(accelerator.state.deepspeed_plugin.deepspeed_config, 2 * processes, 1, processes, 1.0)
    shape = CaptionTransformerConfig(
        vocab_size=64, d_model=512, encoder_layers=1, decoder_layers=1, ffn_dim=2048, image_size=32, max_positions=8
    )
    gc.collect()
    gc.freeze()  # what is there already is neither looked through nor counted
    policy = CaptionTransformer(shape)
    count = sum(parameter.numel() for parameter in policy.parameters())
    model, optimizer = prepare(accelerator, policy, torch.optim.AdamW(policy.parameters()))
    assert engine_of(accelerator) == engine
    inputs = {"pixel_values": torch.ones(1, 3, 32, 32), "decoder_input_ids": torch.ones(1, 2, dtype=torch.long)}
    seen = dict.fromkeys(MOMENTS, 0)

    def loss(moment: str | None = None) -> Tensor:
        if moment:
            seen[moment] = held(model)
        return model(**inputs).logits.float().mean()

    for _ in range(2):
        optimizer.zero_grad()
        seen["between steps"] = held(model)
        with whole_weights(accelerator, model), torch.no_grad():
            policy(**inputs)
            seen["while sampling"] = held(model)
        backward_all(accelerator, model, [loss, partial(loss, "between micro-batches")])
        seen["before the update"] = held(model)
        if engine.startswith("zero"):
            deepspeed_step(model)
        else:
            accelerator.clip_grad_norm_(list(model.parameters()), 1.0)
            optimizer.step()
    queue.put((count, {moment: value / count for moment, value in seen.items()}))
    accelerator.wait_for_everyone()


def together(engine: str, processes: int, start: str = "spawn") -> dict[str, Any]:
    """One row: the largest of the processes at each moment. ``start`` is how multiprocessing starts them."""
    port = free_port()
    context: Any = multiprocessing.get_context(start)
    queue = context.Queue()
    ranks = [
        context.Process(target=measure, args=(rank, processes, engine, port, queue), daemon=True)
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    found = [queue.get(timeout=300) for _ in ranks]
    for rank in ranks:
        rank.join(60)
    most = {moment: max(seen[moment] for _, seen in found) for moment in MOMENTS}
    return {"engine": engine, "processes": processes, "parameters": found[0][0]} | most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="processes that train together")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--json", type=Path, help="file for the rows, a list of objects")
    chosen = parser.parse_args()
    print(f"{chosen.processes} process(es); bytes a parameter and process")
    print("| engine | " + " | ".join(MOMENTS) + " |")
    print("| --- |" + " ---: |" * len(MOMENTS), flush=True)
    rows = []
    for engine in tqdm(chosen.engines, disable=None):
        rows.append(together(engine, chosen.processes))
        print(f"| {engine} | " + " | ".join(f"{rows[-1][key]:.2f}" for key in MOMENTS) + " |", flush=True)
    print(f"{rows[0]['parameters']:,} parameters, torch {torch.__version__}")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
