"""Short training runs whose results must stay the same to the bit while the code around
them changes.

    python -m tests.recorded record FILE.json      # on a commit whose results are right
    python -m tests.recorded check FILE.json       # on another commit: exit code 1 where anything differs

``baseline.json`` beside this file holds the results of commit 8edf1d71, except for
``policy/kl``, which is computed in float64 since. To record another commit, run this
program there, with this folder's parent on ``PYTHONPATH``: it needs only the command
line, ``python -m rl_caption``.

The runs are tiny and take one or two minutes together: cross-entropy; self-critical
training with three advantages (greedy with a KL term; leave-one-out with a
cross-entropy term and micro-batches; group_norm); a contrastive teacher with hard
negatives; both stages of distillation; a longer text encoder and the specificity
objective. All use the generated world, float32, one thread and a CPU.

For each run the file holds the SHA-256 of the weights of ``export/last`` (name, dtype,
shape and bytes of each tensor, in the order of names) and the logged metrics of every
step. Bits hold for one version of torch and one kind of CPU only: both are in the file,
and ``check`` says where they differ.

Where a key of the configuration is renamed, change it in ``RUNS``. Where the arithmetic
is changed on purpose, record again and say so in the commit.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DATA = {
    "format": "scenes",
    "kwargs": {
        "num_train": 64,
        "num_val": 8,
        "num_test": 0,
        "num_unseen": 0,
        "image_size": 32,
    },
}
LONG_DATA = {**DATA, "long_captions": True}
CAPTIONER = {
    "image_size": 32,
    "patch_size": 8,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "num_heads": 4,
    "ffn_dim": 64,
    "max_positions": 24,
    "dropout": 0.1,
}
CLIP = {
    "embed_dim": 32,
    "vision_cfg": {
        "image_size": 32,
        "patch_size": 8,
        "width": 32,
        "layers": 2,
        "head_width": 16,
    },
    "text_cfg": {
        "context_length": 24,
        "vocab_size": 49408,
        "width": 32,
        "heads": 2,
        "layers": 2,
    },
}
STUDENT = {
    "embed_dim": 32,
    "image_size": 32,
    "patch_size": 8,
    "image_width": 32,
    "image_heads": 4,
    "image_blocks": 1,
    "image_repeats": 2,
    "context_length": 24,
    "text_width": 32,
    "text_heads": 2,
    "text_blocks": 1,
    "embedding_rank": 8,
}
COMMON = {"threads": 1, "mixed_precision": "no", "warmup_steps": 3, "max_steps": 12}
SCST_TRAIN = {**COMMON, "batch_size": 8, "lr": 3e-4}
MODEL_TRAIN = {
    **COMMON,
    "batch_size": 16,
    "lr": 1e-3,
    "schedule": "cosine",
    "weight_decay": 0.01,
}
EVAL = {"every": 6, "batch_size": 8}


def scst(samples: int, train: dict[str, Any]) -> dict[str, Any]:
    """Configuration of a self-critical run that starts from the cross-entropy run."""
    return {
        "model": {"init": "{xe}"},
        "data": DATA,
        "rollout": {"num_samples": samples, "max_new_tokens": 12},
        "reward": {"terms": {"cider": {"weight": 1.0}}},
        "train": {**SCST_TRAIN, **train},
        "eval": EVAL,
    }


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "xe": (
        "xe",
        {
            "model": {"min_count": 1, "kwargs": CAPTIONER},
            "data": DATA,
            "train": {
                **COMMON,
                "max_steps": 160,
                "batch_size": 16,
                "micro_batch_size": 8,
                "lr": 3e-3,
                "schedule": "cosine",
                "label_smoothing": 0.1,
                "captions_per_image": 3,
                "max_target_tokens": 20,
            },
            "eval": {"every": 80, "batch_size": 8},
        },
    ),
    "scst_greedy_kl": ("scst", scst(3, {"advantage": "greedy", "kl_coef": 0.05})),
    "scst_leave_one_out_xe": (
        "scst",
        scst(
            4, {"advantage": "leave_one_out", "xe_weight": 0.1, "micro_batch_size": 2}
        ),
    ),
    "scst_group_norm": (
        "scst",
        scst(4, {"advantage": "group_norm", "loss_reduction": "sequence"}),
    ),
    "contrastive_negatives": (
        "reward_model",
        {
            "task": "contrastive",
            "model": {"kwargs": CLIP},
            "negatives": {"count": 2, "source": "scenes"},
            "data": DATA,
            "train": {**MODEL_TRAIN, "micro_batch_size": 8, "captions": "random"},
            "eval": EVAL,
        },
    ),
    "distillation_image": (
        "reward_model",
        {
            "task": "distill",
            "towers": "image",
            "teacher": {"name": "{contrastive_negatives}"},
            "model": {"kwargs": STUDENT},
            "data": DATA,
            "train": MODEL_TRAIN,
            "eval": EVAL,
        },
    ),
    "distillation_text": (
        "reward_model",
        {
            "task": "distill",
            "towers": "text",
            "teacher": {"name": "{contrastive_negatives}"},
            "model": {"kwargs": STUDENT},
            "data": DATA,
            "train": MODEL_TRAIN,
            "eval": EVAL,
        },
    ),
    "distillation": (
        "reward_model",
        {
            "task": "distill",
            "towers": "dual",
            "teacher": {"name": "{contrastive_negatives}"},
            "model": {
                "image_init": "{distillation_image}",
                "text_init": "{distillation_text}",
            },
            "data": DATA,
            "train": {**MODEL_TRAIN, "micro_batch_size": 8},
            "eval": EVAL,
        },
    ),
    "long_contrastive": (
        "reward_model",
        {
            "task": "contrastive",
            "model": {
                "init": "{contrastive_negatives}",
                "context_length": 124,
                "keep_positions": 4,
            },
            "loss": {"short": 1.0, "pca_rank": 3},
            "data": LONG_DATA,
            "train": {
                **MODEL_TRAIN,
                "short_captions": "references",
                "freeze_positions": 4,
            },
            "eval": EVAL,
        },
    ),
    "specificity": (
        "reward_model",
        {
            "task": "specificity",
            "model": {"init": "{long_contrastive}"},
            "loss": {"alpha": 1.0, "beta": 4.4, "gamma": 4.4},
            "data": LONG_DATA,
            "train": {**MODEL_TRAIN, "shuffle_rate": 0.5, "plain_captions": 0.5},
            "eval": EVAL,
        },
    ),
}
"""Name -> program and configuration; ``{NAME}`` is the folder of the model that an
earlier run exported.
"""
METRICS = (
    "loss/",
    "reward/",
    "advantage/",
    "policy/",
    "completion/",
    "grad/norm",
    "train/lr",
    "val/",
)
"""Prefixes of the compared keys."""
LEFT_OUT = ("val/seconds", "val/hacking/", "val/judge/")


def train(name: str, folder: Path) -> dict[str, Any]:
    """Train one run by its command; return the digests of its weights, and its log."""
    program, config = RUNS[name]
    exports = {other: str(folder / other / "export" / "last") for other in RUNS}
    text = json.dumps({**config, "run": {"dir": str(folder / name), "log_every": 1}})
    for other, export in exports.items():
        text = text.replace(f'"{{{other}}}"', json.dumps(export))
    file = folder / f"{name}.json"
    file.write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    line = [sys.executable, "-m", "rl_caption", program, "--config", str(file)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(
            f"error: {name} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return {"weights": digests(Path(exports[name])), "metrics": metrics(folder / name)}


def digests(folder: Path) -> dict[str, str]:
    """File of weights -> SHA-256 of its tensors."""
    from safetensors.torch import load_file

    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        digest = hashlib.sha256()
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        found[str(path.relative_to(folder))] = digest.hexdigest()
    return found


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log, with the compared metrics alone."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {
            key: value
            for key, value in line.items()
            if key == "step"
            or (key.startswith(METRICS) and not key.startswith(LEFT_OUT))
        }
        for line in lines
    ]


def machine() -> dict[str, str]:
    """Versions and CPU, on which the bits of a result depend."""
    import torch

    cpu = platform.processor()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text().splitlines()
        cpu = next(
            (line.split(":")[1].strip() for line in lines if "model name" in line), cpu
        )
    return {
        "torch": torch.__version__,
        "cpu": cpu,
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def results() -> dict[str, Any]:
    """Train all runs; return their results and the machine."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            print(f"{name} ...", file=sys.stderr, flush=True)
            found[name] = train(name, Path(folder))
    return {"machine": machine(), "runs": found}


def differences(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each run whose weights or metrics differ; new metrics do not count."""
    found = []
    for name, run in recorded["runs"].items():
        own = now["runs"].get(name)
        if own is None:
            found.append(f"{name}: was not run")
            continue
        if own["weights"] != run["weights"]:
            found.append(f"{name}: weights of export/last differ")
        if len(own["metrics"]) != len(run["metrics"]):
            found.append(
                f"{name}: {len(own['metrics'])} log lines, not {len(run['metrics'])}"
            )
        for line, before in zip(own["metrics"], run["metrics"], strict=False):
            keys = sorted(key for key in before if line.get(key) != before[key])
            if keys:
                pairs = [
                    f"{key} {line.get(key)} in place of {before[key]}" for key in keys
                ]
                found.append(
                    f"{name}, step {before['step']}, the first to differ: "
                    + "; ".join(pairs)
                )
                break
    return found


def main() -> int:
    """Record or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    chosen = parser.parse_args()
    if chosen.action == "record":
        chosen.file.write_text(json.dumps(results(), indent=1) + "\n")
        return 0
    recorded = json.loads(chosen.file.read_text())
    for key, value in machine().items():
        if value != recorded["machine"][key]:
            was = recorded["machine"][key]
            print(
                f"note: {key} is {value}, but was {was}: bits may differ for that alone"
            )
    found = differences(recorded, results())
    print("\n".join(found) or f"all {len(recorded['runs'])} runs are equal to the bit")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
