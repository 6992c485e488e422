"""``grpo_vlm``: TRL's trainers on tiny vision-language models, from the configuration to the table of scores."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from trl import GRPOConfig, RLOOConfig
from trl.trainer import rloo_trainer

from rewards.base import RewardError
from rewards.registry import build
from rl_caption.captioners.loading import weights_hash
from rl_caption.cli.configuration import parse
from rl_caption.cli.main import main
from rl_caption.data.base import DataError, Row, load_image
from rl_caption.integrations.trl import rows
from rl_caption.integrations.trl.config import GrpoVlmConfig, VlmConfig
from rl_caption.integrations.trl.model import load_vlm
from rl_caption.integrations.trl.program import (
    check_engine,
    find_trl_checkpoint,
    fine_tune,
    trl_arguments,
    vllm_suppression,
)
from rl_caption.lab.share import share
from rl_caption.programs.report.read import ReportError, read_run
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.launch import LaunchError
from rl_caption.training.checkpoint import CheckpointError
from tests.conftest import REPOSITORY
from tests.training_for_tests import lines
from tests.vlm_families_for_tests import save_vlm
from tests.vlm_for_tests import (
    BANNED,
    IDEFICS_TEMPLATE,
    RECORDER,
    Recorder,
    grpo_config,
    six_images,
    tiny_idefics3,
    tiny_qwen2_vl,
    vlm_captions,
)

pytestmark = pytest.mark.slow

SCENES = {
    "format": "scenes",
    "kwargs": {"num_train": 8, "num_val": 2, "num_test": 2, "num_unseen": 0, "image_size": 32},
}


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Accelerate keeps one state a process, which no other test should find."""
    AcceleratorState._reset_state(reset_partial_state=True)
    Recorder.calls.clear()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and data of six images in files; one row has its own prompt."""
    folder = tmp_path_factory.mktemp("vlm")
    tiny_qwen2_vl(folder / "qwen2_vl")
    tiny_idefics3(folder / "idefics3")
    six_images(folder)
    return folder


def settings(folder: Path, run: Path, **changes: Any) -> GrpoVlmConfig:
    """A configuration, parsed from YAML as the program does it; ``changes`` are dotted keys."""
    file = run.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(grpo_config(folder, run, **changes)))
    return parse(GrpoVlmConfig, ["--config", str(file)], "grpo_vlm.py")


def untimed(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key != "step_time"} for line in lines(run)
    ]


def equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weights[name], expected[name]) for name in expected)


def moved(start: Path, run: Path) -> set[str]:
    """Names of the weights that the training changed."""
    before, after = (
        load_file(start / "model.safetensors"),
        load_file(run / "export/last/model.safetensors"),
    )
    assert before.keys() == after.keys(), "adapters are merged"
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_grpo_with_lora_trains_exports_and_is_judged(
    folder: Path, tmp_path: Path, capfd: Any
) -> None:
    run = tmp_path / "run"
    changes = {"eval.before": True, "train.max_steps": 4}
    table = fine_tune(settings(folder, run, **changes))
    assert re.search(r"^test-before +2 ", table, re.MULTILINE)
    assert re.search(r"^test +2 ", table, re.MULTILINE)
    assert "step 4/4  cider " in (printed := capfd.readouterr().err)
    assert "words " in printed
    assert "(0 to 10)" in printed

    logged = lines(run)
    assert [line["step"] for line in logged] == [1, 2, 3, 4]
    # No settings are inherited: the model's own generation_config has top_k 1, with which samples would be equal, and
    # bans most words.
    assert len(Recorder.calls) == 4
    assert set(BANNED) & {
        token for call in Recorder.calls for ids in call["completion_ids"] for token in ids
    }
    for call, line in zip(Recorder.calls, logged, strict=True):
        texts = [completion[-1]["content"] for completion in call["completions"]]
        assert len(texts) == 4
        assert len(set(texts)) > 2
        assert call["image_id"][0] == call["image_id"][1] != call["image_id"][2]
        assert call["image"][0] is call["image"][1], (
            "equal images are one object, so that they are encoded once"
        )
        assert all(own[1] == "two small stars ." for own in call["references"])
        assert call["finished"] == [ids[-1] in (0, 2) for ids in call["completion_ids"]]
        assert not {1, 3, 4, 5, 6} & {token for ids in call["completion_ids"] for token in ids}, (
            "a special token"
        )
        words = [len(text.split()) for text in texts]
        assert line["rewards/words/mean"] == pytest.approx(sum(words) / 4)
        assert line["reward"] == pytest.approx(
            line["rewards/cider/mean"] + 0.1 * line["rewards/words/mean"], rel=1e-5
        )
    asked = {
        i: p[0]["content"][1]["text"]
        for c in Recorder.calls
        for i, p in zip(c["image_id"], c["prompts"], strict=True)
    }
    assert asked == {
        str(i): "what do you see ?" if i == 0 else "describe this image" for i in range(4)
    }

    result = json.loads((run / "result.json").read_text())
    assert result["step"] == 4
    assert set(result["metrics"]) == {"test", "test-before"}
    predictions = json.loads((run / "eval/test/predictions.json").read_text())
    assert [row["image_id"] for row in predictions] == [4, 5]
    assert "CIDEr" in json.loads((run / "eval/test/scores.json").read_text())["metrics"]

    share(run, out=tmp_path / "shared", evaluation=run / "eval/test")
    card = (tmp_path / "shared/README.md").read_text()
    assert all(
        part in card
        for part in ("GRPO (TRL), 4 steps", "| the last step |", "`test` of `data.jsonl`")
    )
    with pytest.raises(ReportError, match=weights_hash(run / "export/last")[:8]):
        share(run, out=tmp_path / "start", evaluation=run / "eval/test-before")

    after, changed = (
        load_file(run / "export/last/model.safetensors"),
        moved(folder / "qwen2_vl", run),
    )
    assert changed
    assert all("visual" not in name and re.search(r"(proj)\.weight$", name) for name in changed)
    exported = load_vlm(VlmConfig(name=str(run / "export/last")), "float32")
    assert exported.generation_config.eos_token_id == [2, 0], "TRL changes it, the export does not"
    rows: list[Row] = [
        {"image_id": str(i), "image": str(folder / f"{i}.png"), "references": []} for i in (4, 5)
    ]
    captions = vlm_captions(run / "export/last", rows)
    assert [captions[str(row["image_id"])] for row in predictions] == [
        row["caption"] for row in predictions
    ]

    # Stopped in its second pass, it goes on to the same result; a checkpoint that was cut off is passed over.
    order = [call["image_id"] for call in Recorder.calls]
    assert order[3] != order[1], "a pass has its own order"
    stopped = tmp_path / "stopped"
    shutil.copytree(run, stopped)
    inputs = run / "checkpoints/checkpoint-4/inputs.json"
    recorded = json.loads(inputs.read_text())
    for key, value in (("reward", "another"), ("data", {"train texts": "8 rows 0"})):
        other = tmp_path / key
        shutil.copytree(run, other)
        (other / "result.json").unlink()
        (other / "checkpoints/checkpoint-4/manifest.json").unlink()  # as in older versions
        (other / "checkpoints/checkpoint-4/inputs.json").write_text(
            json.dumps(recorded | {key: value})
        )
        with pytest.raises(
            CheckpointError, match=f"{key}.*{'another' if key == 'reward' else 'train texts'}"
        ):
            fine_tune(settings(folder, other, **changes))
    for name in ("optimizer.pt", "scheduler.pt"):
        damaged = tmp_path / f"damaged-{name}"
        shutil.copytree(run, damaged)
        (damaged / "result.json").unlink()
        state = damaged / "checkpoints/checkpoint-4" / name
        state.write_bytes(state.read_bytes()[:-30])
        with pytest.raises(CheckpointError, match=re.escape(str(state))):
            fine_tune(settings(folder, damaged, **changes))
    for name in ("export", "eval/test"):
        shutil.rmtree(stopped / name)
    (stopped / "result.json").unlink()
    (stopped / "checkpoints/checkpoint-4/trainer_state.json").write_text('{"best')
    again = settings(folder, stopped, **changes)
    assert find_trl_checkpoint(again) == (3, stopped / "checkpoints/checkpoint-3")
    Recorder.calls.clear()
    assert fine_tune(again) == table, "with the scores from before the training"
    assert [call["image_id"] for call in Recorder.calls] == order[3:]
    assert untimed(stopped) == untimed(run)
    assert json.loads((stopped / "result.json").read_text()) == result
    assert equal(load_file(stopped / "export/last/model.safetensors"), after)
    (stopped / "result.json").unlink()  # killed after the last step
    assert fine_tune(again) == table
    assert equal(load_file(stopped / "export/last/model.safetensors"), after)
    assert main(["grpo_vlm", "--config", str(stopped.with_suffix(".yaml"))]) == 0
    assert "is complete" in capfd.readouterr().err
    with pytest.raises(CheckpointError, match=r"train.lr: 0.01 -> 0.02"):
        fine_tune(settings(folder, stopped, **{**changes, "train.lr": 0.02}))
    new = {
        "train.lr": 0.02,
        "train.weight_decay": 0.5,
        "train.max_steps": 5,
        "eval.before": False,
        "eval.split": None,
    }
    fine_tune(settings(folder, stopped, **{**changes, **new, "run.resume": True}))
    assert [line["learning_rate"] for line in lines(stopped)] == [0.01] * 4 + [0.02]
    groups = torch.load(stopped / "checkpoints/checkpoint-5/optimizer.pt")["param_groups"]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.02, 0.5), (0.02, 0.0)]
    with pytest.raises(CheckpointError, match=r"run\.resume"):
        fine_tune(settings(folder, stopped, **{"run.resume": False}))


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    model, data = tmp_path / "model", tmp_path / "data"
    shutil.copytree(folder / "qwen2_vl", model)
    shutil.copytree(folder, data, ignore=lambda *_: ["qwen2_vl", "idefics3"])
    changes = {
        "model.name": str(model),
        "data.path": str(data / "data.jsonl"),
        "train.max_steps": 1,
    }
    changes |= {"eval.split": None}
    fine_tune(settings(folder, tmp_path / "other", **changes, **{"train.lr": 0.02}))
    run = tmp_path / "run"
    fine_tune(settings(folder, run, **changes))
    (run / "result.json").unlink()
    again, checkpoint = settings(folder, run, **changes), run / "checkpoints/checkpoint-1"

    for name in ("adapter_model.safetensors", "optimizer.pt", "rng_state.pth"):
        content = (checkpoint / name).read_bytes()
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        (checkpoint / name).write_bytes(changed)
        with pytest.raises(CheckpointError, match=re.escape(name)):
            fine_tune(again)
        (checkpoint / name).write_bytes(content)

    for file, key in (
        (model / "model.safetensors", r"model\.name"),
        (data / "data.jsonl", "train texts"),
    ):
        content = file.read_bytes()
        rows = content.splitlines(keepends=True)
        file.write_bytes(
            content[:-4] + bytes(4)
            if key != "train texts"
            else b"".join([rows[1], rows[0], *rows[2:]])
        )
        with pytest.raises(CheckpointError, match=key):
            fine_tune(again)
        file.write_bytes(content)
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "other/checkpoints/checkpoint-1", checkpoint)
    with pytest.raises(CheckpointError, match=r"train\.lr: 0\.02 -> 0\.01"):
        fine_tune(again)


def test_rloo_with_all_weights_trains_and_is_judged(folder, tmp_path, monkeypatch):
    loaded: list[dict[str, Any]] = []
    load = rloo_trainer.create_model_from_path
    monkeypatch.setattr(
        rloo_trainer, "create_model_from_path", lambda *a, **k: (loaded.append(k), load(*a, **k))[1]
    )
    run = tmp_path / "run"
    changes = {
        "trainer": "rloo", "model.name": str(folder / "idefics3"), "lora": None, "data": SCENES, "train.kl_coef": 0.1,
        "train.micro_batch_size": 1, "run.save_every": 5, "run.keep_checkpoints": 1, "model.revision": "main",
        "train.gradient_checkpointing": False, "eval.judges": {"rouge_l": {}},
        "eval.tokenizer": "unicode",
    }  # fmt: skip
    table = fine_tune(settings(folder, run, **changes))
    assert "oracle" in table
    assert "rouge_l, 0 to 1" in table
    assert build("rouge_l", tokenizer="unicode").signature in table
    logged = lines(run)
    assert len(logged) == 2
    assert {"rewards/cider/mean", "rewards/words/mean", "kl", "entropy"} <= logged[0].keys()
    assert logged[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert logged[1]["kl"] != 0
    assert [given["revision"] for given in loaded] == ["main"], (
        "the reference model is the starting model"
    )
    assert not any("scene" in call for call in Recorder.calls), "the truth is for the oracle alone"
    hidden = {"<image>", "<global-img>", "<row_1_col_1>", "<row_2_col_2>", "<pad>", "<|im_start|>"}
    vlm = load_vlm(VlmConfig(name=str(folder / "idefics3")), "float32")
    hidden = set(vlm.processor.tokenizer.convert_tokens_to_ids(sorted(hidden)))
    assert hidden <= set(vlm.suppressed)
    assert not hidden & {
        token for call in Recorder.calls for ids in call["completion_ids"] for token in ids
    }
    after, changed = (
        load_file(run / "export/last/model.safetensors"),
        moved(folder / "idefics3", run),
    )
    assert changed
    assert not any("vision" in name for name in changed)
    assert [path.name for path in (run / "checkpoints").glob("checkpoint-*")] == ["checkpoint-2"], (
        "after the last step"
    )
    # Killed after its last step, it is exported and judged; so it is from a checkpoint in another place.
    (run / "checkpoints/checkpoint-2").rename(tmp_path / "kept")
    other = settings(
        folder, tmp_path / "other", **changes, **{"run.resume": str(tmp_path / "kept")}
    )
    assert fine_tune(other) == table
    assert equal(load_file(tmp_path / "other/export/last/model.safetensors"), after)


def test_all_weights_are_resumed_where_files_have_other_names_for_them(
    folder: Path, tmp_path: Path
) -> None:
    run, changes = tmp_path / "run", {"lora": None, "eval.split": None, "train.max_steps": 3}
    fine_tune(settings(folder, run, **changes))
    expected = load_file(run / "export/last/model.safetensors")
    for gone in ("export", "checkpoints/checkpoint-3"):  # killed after its first pass
        shutil.rmtree(run / gone)
    (run / "result.json").unlink()
    fine_tune(settings(folder, run, **changes))
    assert equal(load_file(run / "export/last/model.safetensors"), expected)
    assert read_run(run).last_step == 3, "without an evaluation, too"


@pytest.mark.parametrize("name", ["qwen2_vl", "idefics3"])
def test_captions_do_not_depend_on_the_batch(folder: Path, name: str) -> None:
    rows: list[Row] = [
        {
            "image_id": str(i),
            "image": str(folder / f"{i}.png"),
            "references": [],
            "prompt": "describe " * (1 + i % 3),
        }
        for i in range(5)
    ]
    one_by_one = vlm_captions(folder / name, rows, batch_size=1)
    assert vlm_captions(folder / name, rows, batch_size=5) == one_by_one
    assert list(one_by_one) == ["0", "1", "2", "3", "4"]


def test_mistakes_are_named_before_training(folder: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"rollout.num_samples": 1}, r"rollout.num_samples is 1.*2"),
        (
            {"reward.terms": {"cider": {"weight": 0}, "bleu": {"weight": 0}}},
            r"reward\.terms bleu, cider",
        ),
        ({"lora": None, "model.dtype": "float16"}, r"model.dtype is 'float16'"),
        ({"model.freeze": ["*visuel*"]}, r"model.freeze has '\*visuel\*'"),
        ({"eval.before": True, "run.trackers": ["tensorbord"]}, "TRL refuses .*tensorbord"),
        ({"reward.normalize": "per_term"}, "reward.normalize is 'per_term'"),
        ({"data.features_root": "f"}, "data.features_root is 'f'"),
        ({"data.augment": ["crop"]}, "data.augment is"),
        ({"train.kwargs": {"losstype": "x"}}, r"train.kwargs.*GRPOConfig.*'losstype'"),
        ({"rollout.engine": "vllm"}, r"rollout\.engine"),
        ({"train.kwargs": {"use_vllm": True}}, "use_vllm"),
        ({"train.kwargs": {"beta": 0.1}}, r"train.kwargs has \['beta'\]"),
        ({"train.batch_size": 5}, r"train.batch_size is 5.*4"),
        (
            {"reward.terms": {"w": {"target": RECORDER, "kwargs": {"needs": "depth"}}}},
            r"\['depth'\]",
        ),
        ({"eval.judges": {"w": {"target": RECORDER, "kwargs": {"needs": "depth"}}}}, "judges.w"),
        ({"model.name": "no/where", "data.path": "no/where"}, r"model.name 'no/where'"),
        ({"lora.target_modules": ["q"]}, r"lora.target_modules"),
        ({"lora": None, "model.freeze": ["*"]}, "model.freeze "),
        ({"train.lr": 0.0}, r"train.lr is 0.0.*0"),
        ({"eval.metrics": ["cidre"]}, r"eval.metrics has \['cidre'\].*bleu"),
        ({"train.micro_batch_size": 3}, "micro_batch_size"),
        (
            {"train.kwargs": {"steps_per_generation": 1, "generation_batch_size": 4}},
            "'steps_per_generation'",
        ),
        ({"eval.split": "tset"}, "split 'tset'"),
        (
            {"reward.terms": {"l_clipscore": {"kwargs": {"backbone": "no/where"}}}},
            "reward.terms.l_clipscore: student",
        ),
        ({"lora": None, "model.freeze": ["*visuel*"]}, r"model.freeze has"),
    ):
        with pytest.raises((ConfigError, DataError, ValueError), match=message):
            fine_tune(settings(folder, tmp_path / "run", **changes))
        assert not (tmp_path / "run/metrics.jsonl").exists()
        assert not list((tmp_path / "run").glob("eval/*")), "nothing was captioned"


@dataclasses.dataclass
class SamplingParams:
    """The arguments of vLLM's class (0.22 to 0.31) that TRL and this package set; it refuses others."""

    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None


def test_vllm_is_told_in_its_own_words_which_tokens_are_not_sampled() -> None:
    biased = SamplingParams(**vllm_suppression([3, 5], 8, "colocate"))
    assert biased.logit_bias == {3: -100.0, 5: -100.0}
    sent = json.loads(json.dumps(vllm_suppression([3, 5], 8, "server")))
    assert SamplingParams(**sent).allowed_token_ids == [0, 1, 2, 4, 6, 7]


def test_images_are_opened_once_a_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(rows, "load_image", lambda image: opened.append(image) or load_image(image))
    images = [str(folder / f"{number}.png") for number in range(3)]
    some: list[Row] = [{"image_id": image, "image": image, "references": ["a"]} for image in images]
    dataset: Any = rows.trl_dataset(some, "describe this image")
    for numbers in ([0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 2, 2]):
        examples = dataset.__getitems__(numbers)
        assert [example["image_id"] for example in examples] == [
            images[number] for number in numbers
        ]
        assert examples[0]["image"] is examples[1]["image"]
        assert examples[0]["image"].getpixel((3, 5)) == load_image(images[numbers[0]]).getpixel(
            (3, 5)
        )
    assert opened == images


def test_engines_that_were_not_tried_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as `accelerate launch --use_fsdp` does
    with pytest.raises(LaunchError, match="ACCELERATE_USE_FSDP"):
        fine_tune(settings(folder, tmp_path / "run"))
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    engine = SimpleNamespace(
        deepspeed_plugin=SimpleNamespace(zero_stage=3), fsdp=None, ds3_gather_for_generation=True
    )
    check_engine(engine)
    engine.ds3_gather_for_generation = False
    with pytest.raises(ConfigError, match="ds3_gather_for_generation"):
        check_engine(engine)
    engine.deepspeed_plugin.zero_stage = 2
    check_engine(engine)
    engine.fsdp = True
    with pytest.raises(ConfigError, match=r"train\.kwargs\.fsdp"):
        check_engine(engine)


def test_missing_images_and_a_broken_reward_end_the_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        json.dumps({"image": "gone.png", "references": ["a"]}) + "\n"
    )
    with pytest.raises(DataError, match=r"gone\.png"):
        fine_tune(
            settings(
                folder,
                tmp_path / "a",
                **{"data.path": str(tmp_path / "data.jsonl"), "eval.split": None},
            )
        )
    broken = {"broken": {"target": RECORDER, "kwargs": {"breaks": True}}}
    with pytest.raises(RewardError, match=r"term 'broken'.*caption 0"):
        fine_tune(settings(folder, tmp_path / "b", **{"reward.terms": broken, "eval.split": None}))


def test_models_that_trl_cannot_train_are_told(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder / "qwen2_vl", bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"model\.name '.*bare'"):
        load_vlm(VlmConfig(name=str(bare)), "float32")
    (bare / "config.json").write_text(
        json.dumps({"model_type": "vision-encoder-decoder", "is_encoder_decoder": True})
    )
    with pytest.raises(ConfigError, match=r"model\.name"):
        load_vlm(VlmConfig(name=str(bare)), "float32")
    prefix = save_vlm("paligemma", tmp_path / "prefix")
    (prefix / "chat_template.jinja").write_text(IDEFICS_TEMPLATE)
    with pytest.raises(ConfigError, match=r"model\.name .*token_type_ids"):
        load_vlm(VlmConfig(name=str(prefix)), "float32")


@pytest.mark.parametrize("file", ["grpo_vlm.yaml", "grpo_vlm_clip.yaml", "rloo_vlm.yaml"])
def test_shipped_configurations_are_understood_by_trl(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (
        GRPOConfig,
        RLOOConfig,
    ):  # as where a process sees four devices, of which TRL refuses DataParallel
        prepare = kind.__post_init__
        monkeypatch.setattr(
            kind, "__post_init__", lambda own, old=prepare: (old(own), setattr(own, "_n_gpu", 4))
        )
    config = parse(
        GrpoVlmConfig, ["--config", str(REPOSITORY / "configs/trl" / file)], "grpo_vlm.py"
    )
    config.train.mixed_precision = "no"
    arguments = trl_arguments(config, 1)
    assert arguments.n_gpu == 1
    assert type(arguments).__name__ == f"{config.trainer.upper()}Config"
    assert file.startswith(config.trainer)
    completions = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    assert completions == config.train.batch_size * config.rollout.num_samples
    assert (arguments.top_k, arguments.top_p, arguments.min_p, arguments.temperature) == (
        0,
        1.0,
        None,
        1.0,
    )
    assert (arguments.beta, arguments.disable_dropout, arguments.remove_unused_columns) == (
        0.0,
        True,
        False,
    )


def test_the_example_of_the_documentation_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (REPOSITORY / "docs/trl.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert 8 <= len(example.splitlines()) <= 20
    example = example.replace("Qwen/Qwen2-VL-2B-Instruct", str(folder / "qwen2_vl"))
    example = example.replace("photos/", f"{folder}/").replace(
        "max_steps=500", "max_steps=1, use_cpu=True, bf16=False"
    )
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(compile(example, "docs/trl.md", "exec"), found)
    assert any("rewards/cider/mean" in line for line in found["trainer"].state.log_history)
