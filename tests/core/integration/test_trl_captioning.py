"""``grpo_vlm``: TRL's trainers on tiny vision-language models, from the configuration
to the exported model.
"""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from peft import PeftModel
from safetensors.torch import load_file
from trl import GRPOConfig, RLOOConfig
from trl.data_utils import prepare_multimodal_messages

from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.config import SavedModelConfig
from rl_caption.captioners.loading import load_captioner
from rl_caption.captioners.vlm_families import special_tokens
from rl_caption.cli.configuration import parse
from rl_caption.cli.main import main
from rl_caption.data.base import DataError
from rl_caption.integrations.trl import rows
from rl_caption.integrations.trl.config import GrpoVlmConfig
from rl_caption.integrations.trl.model import (
    check_vllm_prompt,
    collapse_runs,
    load_vlm,
)
from rl_caption.integrations.trl.program import (
    Log,
    WrongSamplesError,
    fine_tune,
    trl_arguments,
)
from rl_caption.lab.config import ShareConfig
from rl_caption.lab.share import share
from rl_caption.programs.report.read import read_run
from rl_caption.runtime.errors import ConfigError
from rl_caption.training.checkpoint import CheckpointError
from rl_caption.training.run import NonFiniteError
from tests.conftest import REPOSITORY
from tests.training_for_tests import lines, read_json
from tests.vlm_for_tests import Recorder, grpo_config, six_images
from tests.zoo.families import save_vlm
from tests.zoo.vision_language import (
    BANNED,
    IDEFICS_TEMPLATE,
    tiny_idefics3,
    tiny_qwen2_vl,
)

pytestmark = pytest.mark.slow

SCENES = {
    "format": "scenes",
    "kwargs": {
        "num_train": 8,
        "num_val": 2,
        "num_test": 2,
        "num_unseen": 0,
        "image_size": 32,
    },
}


@pytest.fixture(autouse=True)
def own_state():
    """Accelerate keeps one state a process, which no other test should find."""
    AcceleratorState._reset_state(reset_partial_state=True)
    Recorder.calls.clear()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and data of six images in files; one row has its own prompt."""
    folder = tmp_path_factory.mktemp("vlm")
    tiny_qwen2_vl(folder / "qwen2_vl")
    tiny_idefics3(folder / "idefics3")
    six_images(folder)
    return folder


def settings(folder, run, **changes):
    """A configuration, parsed from YAML as the program does it; ``changes`` are dotted keys."""
    file = run.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(grpo_config(folder, run, **changes)))
    return parse(GrpoVlmConfig, ["--config", str(file)], "grpo_vlm.py")


def untimed(run):
    return [line | {"step_time": None} for line in lines(run)]


def exported(run):
    return load_file(run / "export/last/model.safetensors")


def equal(weights, expected):
    return all(torch.equal(weights[name], expected[name]) for name in expected)


def written():
    """All tokens of the captions that were scored."""
    tokens = set()
    for call in Recorder.calls:
        tokens.update(*call["completion_ids"])
    return tokens


def moved(start, run):
    """Names of the weights that the training changed."""
    before, after = load_file(start / "model.safetensors"), exported(run)
    assert before.keys() == after.keys(), "adapters are merged"
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_grpo_with_lora_trains_and_exports(folder, tmp_path):
    run = tmp_path / "run"
    changes = {"trl.max_steps": 4}
    assert str(run / "export/last") in fine_tune(settings(folder, run, **changes))

    logged = lines(run)
    assert [line["step"] for line in logged] == [1, 2, 3, 4]
    # No settings are inherited: the model's own generation_config has top_k 1, with which samples
    # would be equal, and bans most words.
    assert len(Recorder.calls) == 4
    assert set(BANNED) & written()
    assert not {1, 3, 4, 5, 6} & written(), "a special token"
    asked = {}
    for call, line in zip(Recorder.calls, logged, strict=True):
        texts = [completion[-1]["content"] for completion in call["completions"]]
        assert len(texts) == 4
        assert len(set(texts)) > 2
        assert call["image_id"][0] == call["image_id"][1] != call["image_id"][2]
        assert call["image"][0] is call["image"][1], "equal images are encoded once"
        assert all(own[1] == "two small stars ." for own in call["references"])
        assert call["finished"] == [ids[-1] in (0, 2) for ids in call["completion_ids"]]
        words = sum(len(text.split()) for text in texts) / 4
        assert line["rewards/words/mean"] == pytest.approx(words)
        total = line["rewards/cider/mean"] + 0.1 * words
        assert line["reward"] == pytest.approx(total, rel=1e-5)
        for image, prompt in zip(call["image_id"], call["prompts"], strict=True):
            asked[image] = prompt[0]["content"][1]["text"]
    usual = dict.fromkeys("0123", "describe this image")
    assert asked == usual | {"0": "what do you see ?"}

    result = read_json(run)
    assert result["step"] == 4
    share(ShareConfig(path=str(run), out=str(tmp_path / "shared")))
    card = (tmp_path / "shared/README.md").read_text()
    assert all(part in card for part in ("- method: grpo", "- steps: 4"))

    after, changed = exported(run), moved(folder / "qwen2_vl", run)
    assert changed
    assert all(re.fullmatch(r"(?!.*visual).*proj\.weight", name) for name in changed)
    own = load_captioner(run / "export/last")
    assert own.policy.model.generation_config.eos_token_id == [2, 0]
    assert own.prompt == "describe this image"

    # Stopped in its second pass, it goes on to the same result; a checkpoint that was cut off is
    # passed over.
    order = [call["image_id"] for call in Recorder.calls]
    assert order[3] != order[1], "a pass has its own order"
    stopped = tmp_path / "stopped"
    shutil.copytree(run, stopped)
    shutil.rmtree(stopped / "export")
    (stopped / "result.json").unlink()
    (stopped / "checkpoints/checkpoint-4/trainer_state.json").write_text('{"best')
    again = settings(folder, stopped, **changes)
    Recorder.calls.clear()
    fine_tune(again)
    assert [call["image_id"] for call in Recorder.calls] == order[3:]
    assert untimed(stopped) == untimed(run)
    assert read_json(stopped) == result
    assert equal(exported(stopped), after)
    # Killed after the last step, or complete.
    assert main(["grpo_vlm", "--config", str(stopped.with_suffix(".yaml"))]) == 0
    assert equal(exported(stopped), after)
    changes["trl.learning_rate"] = 0.02
    with pytest.raises(CheckpointError, match=r"trl.learning_rate: 0.01 -> 0.02"):
        fine_tune(settings(folder, stopped, **changes))


def test_adapters_are_merged_in_float32_whatever_the_training_computes_in(
    folder, tmp_path
):
    run = tmp_path / "run"
    changes = {"model.dtype": "bfloat16", "trl.bf16": True, "trl.learning_rate": 1e-4}
    fine_tune(settings(folder, run, **changes))
    start = load_captioner(folder / "qwen2_vl", dtype="bfloat16")
    base = start.policy.model.float()
    expected = {name: value.clone() for name, value in base.state_dict().items()}
    adapted = PeftModel.from_pretrained(base, run / "checkpoints/checkpoint-2")
    with torch.no_grad():
        merged = adapted.merge_and_unload().state_dict()
    found = load_captioner(run / "export/last")
    found = found.policy.model.state_dict()
    updates = {name: merged[name] - expected[name] for name in merged}
    assert sum(bool(update.any()) for update in updates.values()) == 8
    for name, update in updates.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(
            found[name] - expected[name], update, rtol=0.01, atol=1e-8
        )


def test_a_checkpoint_of_another_run_is_refused_and_a_damaged_one_passed_over(
    folder, tmp_path
):
    model, data = tmp_path / "model", tmp_path / "data"
    shutil.copytree(folder / "qwen2_vl", model)
    shutil.copytree(folder, data, ignore=lambda *_: ["qwen2_vl", "idefics3"])
    changes = {"model.init": str(model), "data.path": str(data / "data.jsonl")}
    run = tmp_path / "run"
    fine_tune(settings(folder, run, **changes))
    (run / "result.json").unlink()
    expected, again = exported(run), settings(folder, run, **changes)

    flipped = run / "checkpoints/checkpoint-2/adapter_model.safetensors"
    content = flipped.read_bytes()
    flipped.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    fine_tune(again)
    assert equal(exported(run), expected), "from checkpoint-1"
    (run / "result.json").unlink()

    for file, key in (
        (model / "model.safetensors", "weights"),
        (data / "data.jsonl", "train texts"),
    ):
        content = file.read_bytes()
        rows = content.splitlines(keepends=True)
        texts = b"".join([rows[1], rows[0], *rows[2:]])
        file.write_bytes(texts if key == "train texts" else content[:-4] + bytes(4))
        with pytest.raises(CheckpointError, match=key):
            fine_tune(again)
        file.write_bytes(content)


def test_rloo_with_all_weights_trains_and_is_resumed(folder, tmp_path):
    run, start = tmp_path / "run", folder / "idefics3"
    changes = {
        "trainer": "rloo",
        "model.init": str(start),
        "model.lora": None,
        "data": SCENES,
        "trl.beta": 0.1,
        "trl.gradient_checkpointing": False,
    }
    fine_tune(settings(folder, run, **changes))
    logged = lines(run)
    assert len(logged) == 2
    keys = {"rewards/cider/mean", "rewards/words/mean", "kl", "entropy"}
    assert keys <= logged[0].keys()
    # The reference is the starting model.
    assert logged[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert logged[1]["kl"] != 0
    assert not any("scene" in call for call in Recorder.calls), "the truth"
    vlm = load_captioner(start)
    names = ["<image>", "<global-img>", "<row_1_col_1>", "<pad>", "<|im_start|>"]
    hidden = set(vlm.tokenizer.convert_tokens_to_ids(names))
    assert hidden <= set(special_tokens(vlm.processor, vlm.policy.model)[1])
    assert not hidden & written()
    after, changed = exported(run), moved(start, run)
    assert changed
    assert not any("vision" in name for name in changed)
    for gone in ("export", "checkpoints/checkpoint-2"):  # killed after its first step
        shutil.rmtree(run / gone)
    (run / "result.json").unlink()
    fine_tune(settings(folder, run, **changes))
    assert equal(exported(run), after)
    assert read_run(run).last_step == 2


@pytest.mark.parametrize("name", ["qwen2_vl", "idefics3"])
def test_captions_are_evaluated_after_the_prompts_of_the_training(folder, name):
    captioner = load_captioner(folder / name, prompt="describe this image")
    some = [
        {"image_id": str(i), "image": str(folder / f"{i}.png"), "references": []}
        for i in range(3)
    ]
    some[1]["prompt"] = "what do you see ?"
    dataset = rows.trl_dataset(some, captioner.prompt)
    for row, example in zip(some, dataset.__getitems__([0, 1, 2]), strict=True):
        images = [example["image"]]
        messages = prepare_multimodal_messages(example["prompt"], images=images)
        made = captioner.processor.apply_chat_template(
            [messages], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        expected = list(map(list, made["input_ids"]))
        assert captioner.preprocess([row])["input_ids"].tolist() == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trl.losstype": "x"}, r"TRL refuses trl.*losstype"),
        ({"trl.use_vllm": True}, "vllm"),
        ({"reward.normalize": "per_term"}, "reward has normalize"),
        ({"model.lora": None, "model.freeze": ["*"]}, "model.freeze "),
        ({"model.lora.target_modules": ["qqq"]}, "TRL refuses .*target_modules"),
    ],
)
def test_mistakes_are_named_before_training(folder, tmp_path, changes, message):
    with pytest.raises((ConfigError, DataError, CaptionerError), match=message):
        fine_tune(settings(folder, tmp_path / "run", **changes))
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_vllm_gets_one_image_token_an_image_or_is_refused(folder):
    assert collapse_runs([7, 7, 1, 7, 7, 7, 2, 7], 7) == [7, 1, 7, 2, 7]
    row = {"image_id": "0", "image": str(folder / "0.png"), "references": []}
    qwen = load_captioner(folder / "qwen2_vl", prompt="describe this image")
    ids = qwen.preprocess([row])["input_ids"][0].tolist()
    image = qwen.policy.config.image_token_id
    assert ids.count(image) > 1 == collapse_runs(ids, image).count(image)
    check_vllm_prompt(qwen, row)
    idefics = load_vlm(SavedModelConfig(init=str(folder / "idefics3")))
    with pytest.raises(ConfigError, match=r"trl\.use_vllm"):
        check_vllm_prompt(idefics, row)


DIFFERENCE = "sampling/sampling_logp_difference/mean"


@pytest.mark.parametrize(
    ("key", "value", "bf16", "error"),
    [
        ("loss", float("nan"), True, NonFiniteError),
        (DIFFERENCE, 0.06, False, WrongSamplesError),
    ],
)
def test_wrong_numbers_end_a_run(tmp_path, key, value, bf16, error):
    log = Log(tmp_path / "metrics.jsonl", {})
    arguments = SimpleNamespace(bf16=bf16, fp16=False)
    state = SimpleNamespace(global_step=3, max_steps=9, is_world_process_zero=True)
    good = {"loss": 0.1, "completions/mean_length": 3.0, DIFFERENCE: 1e-4}
    log.on_log(arguments, state, None, good)
    with pytest.raises(error, match=f"{value}"):
        log.on_log(arguments, state, None, good | {key: value})


def test_a_model_whose_prompts_trl_would_read_otherwise_is_refused(tmp_path):
    prefix = save_vlm("paligemma", tmp_path / "prefix")
    (prefix / "chat_template.jinja").write_text(IDEFICS_TEMPLATE)
    with pytest.raises(ConfigError, match=r"model\.init .*token_type_ids"):
        load_vlm(SavedModelConfig(init=str(prefix)))


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_the_shipped_configuration_is_understood_by_trl(trainer, monkeypatch):
    for kind in (GRPOConfig, RLOOConfig):  # as where a process sees four devices

        def see_four(own, prepare=kind.__post_init__):
            prepare(own)
            own._n_gpu = 4

        monkeypatch.setattr(kind, "__post_init__", see_four)
    words = ["--config", "trl/grpo_vlm", "--trainer", trainer, "--trl.beta", "0.0"]
    arguments = trl_arguments(parse(GrpoVlmConfig, words, "grpo_vlm.py"))
    assert arguments.n_gpu == 1
    assert type(arguments).__name__ == f"{trainer.upper()}Config"
    assert (arguments.top_k, arguments.top_p, arguments.min_p) == (0, 1.0, None)
    assert (arguments.beta, arguments.disable_dropout) == (0.0, True)
    assert not arguments.remove_unused_columns


def test_the_example_of_the_documentation_runs(folder, tmp_path, monkeypatch):
    page = (REPOSITORY / "docs/trl.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    example = example.replace("Qwen/Qwen2-VL-2B-Instruct", str(folder / "qwen2_vl"))
    example = example.replace("photos/", f"{folder}/")
    example = example.replace("max_steps=500", "max_steps=1, use_cpu=True, bf16=False")
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(compile(example, "docs/trl.md", "exec"), found)
    history = found["trainer"].state.log_history
    assert any("rewards/cider/mean" in line for line in history)
