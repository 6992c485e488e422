"""Tiny reward models and the configurations that train them."""

import json

from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.data.scenes import ScenesData
from tests.clip_for_tests import tiny_student
from tests.encoders_for_tests import save_text_encoder
from tests.training_for_tests import DATA as DATA
from tests.training_for_tests import changed
from tests.zoo.language_models import tiny_regressor

CLIP = {
    "embed_dim": 16,
    "vision_cfg": {
        "image_size": 32,
        "patch_size": 16,
        "width": 32,
        "layers": 1,
        "head_width": 16,
    },
    "text_cfg": {
        "context_length": 24,
        "vocab_size": 49408,
        "width": 16,
        "heads": 2,
        "layers": 1,
    },
}
RESNET = CLIP | {
    "vision_cfg": {
        "image_size": 32,
        "layers": [1, 1, 1, 1],
        "width": 8,
        "head_width": 8,
    },
}
STUDENT = {
    "embed_dim": 16,
    "image_size": 32,
    "patch_size": 16,
    "image_width": 32,
    "image_heads": 4,
    "image_blocks": 1,
    "context_length": 24,
    "text_width": 16,
    "text_heads": 2,
    "text_blocks": 1,
    "embedding_rank": 8,
}

CLIP_TASKS = ("contrastive", "positive_augmented", "specificity")
GPT2 = {
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 40,
    "initializer_range": 0.4,
}


def config_of(task="contrastive", **sections):
    """The configuration of a task from the values of its sections."""
    kind = RewardModelConfig.choose({"task": task})
    if task == "distill":
        sections = {
            "teacher": {
                "name": "ViT-B-32",
                "pretrained": "openai",
            }
        } | sections
    return kind(**sections)


def reward_model_config(folder, task, **changes):
    """A tiny run of ``task`` in ``folder``, with accumulation; ``changes`` are dotted keys."""
    return changed(
        {
            "task": task,
            "model": {"kwargs": CLIP if task in CLIP_TASKS else STUDENT},
            "data": DATA,
            "train": {
                "max_steps": 6,
                "batch_size": 8,
                "micro_batch_size": 4,
                "lr": 0.003,
                "warmup_steps": 2,
                "schedule": "cosine",
                "weight_decay": 0.01,
                "threads": 1,
            },
            "eval": {"every": 2, "batch_size": 4},
            "run": {"dir": str(folder), "log_every": 1},
        },
        changes,
    )


def chain(folder):
    """Configurations of teacher, both towers and the whole student, in the order of
    training.

    Also of ``pac``, which starts from the teacher, with generated images and captions;
    of ``long``, the teacher with more positions; and of ``specific``, which starts from
    ``long``.
    """
    best = str(folder / "teacher/export/best")
    teacher = {"teacher.name": best}
    towers = {
        "teacher.name": best,
        "model": {
            "image_init": str(folder / "image/export/best"),
            "text_init": str(folder / "text/export/best"),
        },
    }
    long = {
        "model": {
            "init": best,
            "context_length": 124,
            "keep_positions": 4,
        },
        "data.long_captions": True,
        "loss": {"short": 1.0, "pca_rank": 3},
        "train.label_smoothing": 0.1,
        "train.short_captions": "references",
        "train.freeze_positions": 4,
    }
    specific = {
        "model": {"init": str(folder / "long/export/best")},
        "data.long_captions": True,
    }
    positive = {
        "model": {"init": best},
        "data.kwargs.positives": True,
        "eval.best_by": "val/loss",
    }
    return {
        "teacher": reward_model_config(
            folder / "teacher",
            "contrastive",
            negatives={"count": 2, "source": "scenes"},
        ),
        "image": reward_model_config(
            folder / "image", "distill", towers="image", **teacher
        ),
        "text": reward_model_config(
            folder / "text", "distill", towers="text", **teacher
        ),
        "dual": reward_model_config(
            folder / "dual", "distill", towers="dual", **towers
        ),
        "pac": reward_model_config(folder / "pac", "positive_augmented", **positive),
        "long": reward_model_config(folder / "long", "contrastive", **long),
        "specific": reward_model_config(folder / "specific", "specificity", **specific),
    }


def pretrained_chain(folder):
    """Configurations of a dual encoder of pretrained parts, and of an L-CLIP over its
    frozen image encoder.
    """
    encoder = "tests.encoders_for_tests:TinyImageEncoder"
    text = {
        "encoder": save_text_encoder(folder / "text_encoder"),
        "train_blocks": 0,
    }
    photos = {
        "format": "karpathy",
        "path": str(folder / "data"),
        "image_root": "images",
    }
    data = {"data": photos}
    dual = {
        "model": {"image": {"encoder": encoder}, "text": text},
        "model.kwargs": {
            "embed_dim": 16,
            "hidden": 8,
            "dropout": 0.1,
        },
        "loss": {"false_negatives": "mask", "max_scale": 12.0},
    }
    hybrid = {
        "model": {"kwargs": STUDENT | {"image_encoder": encoder}},
        "train.freeze_patch_embed": False,
        "teacher.name": str(folder / "dual/export/best"),
    }
    return {
        "dual": reward_model_config(folder / "dual", "contrastive", **dual, **data),
        "hybrid": reward_model_config(
            folder / "hybrid", "distill", towers="image", **hybrid, **data
        ),
    }


def text_chain(folder):
    """Configurations of a language model, of a semantic bottleneck on it, and of a
    regression on captions.
    """
    targets = folder / "targets.jsonl"
    if not targets.exists():
        rows = ScenesData(**DATA["kwargs"])["train"]
        captions = [caption for row in rows for caption in row["references"]]
        pairs = [
            {"caption": caption, "target": float("circle" in caption)}
            for caption in captions
        ]
        targets.write_text("\n".join(map(json.dumps, pairs)))
    lm = folder / "language_model/export/best"
    student = folder / "student"
    if not student.exists():
        tiny_student(student)
    roberta = folder / "roberta"
    if not roberta.exists():  # without dropout, whose masks differ between processes
        off = {
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }
        tiny_regressor(roberta, **off)
    changes = {
        "language_model": {
            "model": {
                "vocab_size": 320,
                "kwargs": GPT2,
            }
        },
        "semantic_bottleneck": {
            "model": {"language_model": str(lm), "ending": "eos"},
            "teacher.name": str(student),
            "train.lr": 0.03,
        },
        "text_regression": {
            "model": {"init": str(roberta)},
            "data": {
                "format": "caption_targets",
                "path": str(targets),
                "kwargs": {"val_fraction": 0.2},
            },
        },
    }
    return {
        task: reward_model_config(folder / task, task, **own)
        for task, own in changes.items()
    }
