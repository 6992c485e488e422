"""Models of captions alone by the real command: a language model, a semantic bottleneck
on it, a regression.
"""

import json

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from rewards.clip.bottleneck import (
    CaptionWriter,
    SemanticBottleneck,
    edit_similarity,
)
from rewards.frozen_model import load_frozen
from rewards.registry import build
from rewards.text.icc import Icc
from rewards.text.perplexity import Perplexity
from rl_caption.data.formats import rows_of
from rl_caption.data.published import caption_targets
from rl_caption.data.scenes import ScenesData
from tests.reward_models_for_tests import DATA, GPT2, text_chain
from tests.training_for_tests import (
    Kill,
    assert_close_runs,
    assert_same_run,
    changed,
    checked_run,
    files,
    lines,
    run,
    run_two,
)
from tests.zoo.language_models import tiny_gpt2, tiny_llama_regressor

pytestmark = pytest.mark.slow

TASKS = ("language_model", "semantic_bottleneck", "text_regression")
CAPTIONS = [
    caption
    for row in ScenesData(**DATA["kwargs"])["val"]
    for caption in row["references"]
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text_models")
    for task, config in text_chain(folder).items():
        checked_run(config, folder / task, "reward_model")
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_falls_and_the_best_model_is_exported(trained, task):
    folder = trained / task

    def logged(key):
        return [line[key] for line in lines(folder) if key in line]

    losses = logged("loss/total")
    assert len(losses) == 6
    assert sum(losses[3:]) < sum(losses[:3])
    metric = "val/r_squared" if task == "text_regression" else "val/token_logprob"
    result = json.loads((folder / "result.json").read_text())
    assert (result["metric"], result["best_metric"]) == (metric, max(logged(metric)))
    exported = {"config.json", "model.safetensors", "manifest.json"}
    found = files(folder / "export/best")
    if task == "semantic_bottleneck":
        assert found == exported, "the frozen models are not copied"
    else:
        assert exported | {"tokenizer.json", "tokenizer_config.json"} <= found


def test_the_language_model_is_a_perplexity_reward(trained):
    folder = trained / "language_model"
    reward = Perplexity(str(folder / "export/best"), floor=-50.0)
    tokenizer = reward._frozen.tokenizer
    tokens = [len(tokenizer(caption)["input_ids"]) + 1 for caption in CAPTIONS]
    mean = np.average(reward(None, CAPTIONS), weights=tokens)
    result = json.loads((folder / "result.json").read_text())
    assert mean == pytest.approx(result["best_metric"])


@pytest.mark.parametrize("start", [None, tiny_llama_regressor, tiny_gpt2])
def test_the_regression_is_an_icc_reward(trained, tmp_path, start):
    """A decoder reads the state of the last token before the padding, for which EOS
    stands where there is none (GPT-2).
    """
    data = rows_of(caption_targets(trained / "targets.jsonl", val_fraction=0.2))
    rows = data["val"]
    folder = trained / "text_regression"
    if start is not None:
        config = text_chain(trained)["text_regression"]
        config["model"] = {"init": str(start(tmp_path / "decoder"))}
        folder = tmp_path / "run"
        config = changed(config, {"run.dir": str(folder)})
        checked_run(config, folder, "reward_model")
    targets = torch.tensor([row["target"] for row in rows])
    reward = Icc(str(folder / "export/best"), clip=False)
    found = torch.tensor(reward(None, [row["references"][0] for row in rows]))
    expected = 1 - float(((found - targets) ** 2).mean() / targets.var(correction=0))
    result = json.loads((folder / "result.json").read_text())
    assert expected == pytest.approx(result["best_metric"], abs=1e-4)


def writer_of(trained, ending):
    folder = str(trained / "language_model/export/best")
    return CaptionWriter(load_frozen("AutoModelForCausalLM", folder, "x"), ending)


def test_likelihood_is_that_of_token_after_token(trained):
    writer = writer_of(trained, "eos")
    frozen = writer.frozen
    soft = torch.randn(
        2,
        1,
        16,
        generator=torch.Generator().manual_seed(0),
    )
    captions = ["a red circle", "the small blue square is here"]
    rows = [torch.tensor(row) for row in writer.token_ids(captions)]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    embed = frozen.network.get_input_embeddings()
    bos = embed(torch.tensor([frozen.tokenizer.bos_token_id]))
    expected = 0.0
    for own, row in zip(soft, rows, strict=True):
        for place, token in enumerate(row):
            inputs = torch.cat([bos, own, embed(row[:place])])
            logits = frozen.network(inputs_embeds=inputs[None]).logits[0, -1]
            expected -= float(logits.log_softmax(-1)[token])
    found = writer.negative_log_likelihood(soft, ids, mask)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_a_newline_ends_a_caption_where_that_is_asked_for(trained):
    writer = writer_of(trained, "newline")
    ids, long = writer.token_ids(["a  red\ncircle", "a" * 200])
    assert writer.frozen.tokenizer.decode(ids) == " a red circle \n"
    assert len(long) == GPT2["n_positions"] - 2


def test_a_bottleneck_is_a_score(trained, tmp_path):
    folder = str(trained / "semantic_bottleneck/export/best")
    options = {
        "num_beams": 3,
        "max_new_tokens": 12,
        "batch_size": 2,
    }
    reward = SemanticBottleneck(folder, **options)
    captions = ["a red circle", "two small blue squares on white", "", "a day"]
    found = reward(None, captions)
    assert found[2] == 0.0
    assert all(0 <= score <= 1 for score in found)
    (beams,) = reward.rewrite(captions[:1])
    assert len(beams) == 3
    best = max(edit_similarity(captions[0], beam) for beam in beams)
    assert found[0] == pytest.approx(best)
    assert "\n" not in "".join(beams)
    by_words = SemanticBottleneck(folder, similarity="rouge_l", **options)
    rouge = build("rouge_l")(None, beams, references=[captions[:1]] * 3)
    assert by_words(None, captions[:1])[0] == pytest.approx(max(rouge))
    other = tiny_gpt2(tmp_path / "other")
    with pytest.raises(ValueError, match=r"sba.*semantic_bottleneck/export/best"):
        SemanticBottleneck(folder, language_model=str(other))
    with pytest.raises(ValueError, match="expected 'semantic_bottleneck'"):
        SemanticBottleneck(str(trained / "language_model/export/best"))


@pytest.mark.parametrize("task", TASKS)
def test_killed_and_started_again(trained, tmp_path, task):
    folder = tmp_path / task
    config = changed(text_chain(trained)[task], {"run.dir": str(folder)})
    kill = Kill("rl_caption.training.run:Run.begin_step", 4)
    checked_run(
        config,
        folder,
        "reward_model",
        kill=kill,
    )
    checked_run(config, folder, "reward_model")
    assert_same_run(folder, trained / task)


@pytest.mark.distributed
@pytest.mark.parametrize("task", TASKS)
def test_two_processes_take_the_same_steps(trained, tmp_path, task):
    config = changed(text_chain(trained)[task], {"run.dir": str(tmp_path / task)})
    whole = trained / task
    if task == "language_model":  # no dropout, whose masks belong to processes
        names = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
        config = changed(config, {f"model.kwargs.{name}": 0.0 for name in names})
        whole = tmp_path / "one"
        one = changed(config, {"run.dir": str(whole)})
        checked_run(one, whole, "reward_model")
    for ended in run_two(config, tmp_path / task, "reward_model"):
        assert ended.code == 0, ended.output
    assert_close_runs(tmp_path / task, whole, rel=1e-4)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (
            "semantic_bottleneck",
            {"model.language_model": None},
            "model.language_model is not set",
        ),
        ("language_model", {"model.kwargs.width": 3}, "model.kwargs has ['width']"),
        (
            "language_model",
            {
                "run.resume": "language_model/checkpoints/step-00000006",
                "data.kwargs.num_train": 20,
            },
            "20 rows",
        ),
        ("text_regression", {"data": DATA}, "learns from caption_targets"),
    ],
)
def test_wrong_configurations_are_refused(trained, tmp_path, task, changes, message):
    if "run.resume" in changes:
        changes = changes | {"run.resume": str(trained / changes["run.resume"])}
    changes = {"run.dir": str(tmp_path / "run")} | changes
    config = changed(text_chain(trained)[task], changes)
    ended = run(config, tmp_path / "run", "reward_model")
    assert ended.code in (1, 2), ended.output
    assert message in ended.output
    assert "Traceback" not in ended.output


def test_wrong_lines_of_targets_are_named(tmp_path):
    path = tmp_path / "targets.jsonl"
    for line, message in (
        ('{"caption": "a dog"}', "line 2, 'target' is not set"),
        ('{"caption": " ", "target": 1}', "line 2.*'caption'"),
    ):
        path.write_text('{"caption": "a cat", "target": 0.5}\n' + line + "\n")
        with pytest.raises(ValueError, match=message):
            rows_of(caption_targets(path), checked=True)
