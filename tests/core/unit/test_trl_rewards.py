"""Every registered reward is a TRL reward function as it stands: a step of both
trainers with all of them.
"""

import pytest
import torch

from rewards.base import RewardError, as_texts, required_column
from rewards.clip.backbone import load_frozen_encoder
from rewards.mixed import MixedReward
from rewards.registry import available, build
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.integrations.trl.rows import FinishedAware
from tests.clip_for_tests import (
    ARCHITECTURE,
    noise_image,
    tiny_checkpoint,
    tiny_student,
)
from tests.encoders_for_tests import save_text_encoder
from tests.hf_models_for_tests import with_template
from tests.zoo.language_models import tiny_gpt2, tiny_regressor
from tests.zoo.vision_language import answering_vlm, tiny_idefics3, tiny_qwen2_vl

pytestmark = pytest.mark.slow

REFERENCES = [
    ["a red circle", "one small red circle ."],
    ["the blue square", "a large blue square ."],
]
QUESTIONS = [
    {
        "question": "What shape is it?",
        "choices": ["circle", "square"],
        "answer": "circle",
    }
]
TEXT = ("bleu", "cider", "consensus", "diversity", "repetition", "rouge_l")


def every_reward(folder):
    """One reward of each registered name, with tiny random encoders, and a mixture."""
    clip = {"backbone": ARCHITECTURE, "pretrained": tiny_checkpoint(folder)}
    student = {"backbone": str(tiny_student(folder / "student"))}
    arguments = {name: {} for name in TEXT}
    arguments |= dict.fromkeys(("clipscore", "ref_clipscore", "specs"), clip)
    arguments |= dict.fromkeys(("l_clipscore", "ref_l_clipscore"), student)
    loaded = {"backbone": load_frozen_encoder(ARCHITECTURE, clip["pretrained"])}
    videos = ("emscore", "ref_emscore", "pac_s_video", "ref_pac_s_video")
    arguments |= dict.fromkeys(("pac_s", "ref_pac_s", *videos), loaded)
    save_text_encoder(folder / "bert")
    arguments["bertscore"] = {"model": str(folder / "bert"), "layers": 2}
    arguments["icc"] = {"model": str(tiny_regressor(folder / "icc"))}
    arguments["perplexity"] = {"model": str(tiny_gpt2(folder / "gpt2"))}
    long_model = tiny_gpt2(folder / "long_gpt2", positions=1024)
    language_model = with_template(long_model, "{{ messages[0]['content'] }}\nAnswer:")
    arguments |= {name: {"model": language_model} for name in ("caption_qa", "claims")}
    arguments["vlm_judge"] = {"model": str(answering_vlm(folder / "vlm"))}
    torch.manual_seed(0)
    rewards = {name: build(name, **given) for name, given in arguments.items()}
    terms = {name: (rewards[name], 0.5) for name in ("cider", "l_clipscore")}
    return {**rewards, "total": MixedReward(terms)}


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    return every_reward(tmp_path_factory.mktemp("rewards"))


@pytest.mark.usefixtures("random_weights")
@pytest.mark.parametrize(("trainer", "column"), [("grpo", "image"), ("rloo", "images")])
def test_a_step_of_the_trainer_with_every_reward(rewards, trainer, column, tmp_path):
    import trl
    from datasets import Dataset

    assert set(rewards) == {*available(), "total"}, "of every_reward()"
    make = tiny_qwen2_vl if trainer == "grpo" else tiny_idefics3
    images = [noise_image(0), noise_image(1)]
    rows = [
        {
            "prompt": [{"role": "user", "content": "describe this image"}],
            column: image if column == "image" else [image],
            "references": REFERENCES[number],
            "image_id": str(number),
            "questions": QUESTIONS,
        }
        for number, image in enumerate(images)
    ]
    heard = []

    def listener(prompts, completions, **columns):
        heard.append({"prompts": prompts, "completions": completions, **columns})
        return [0.0] * len(completions)

    arguments = getattr(trl, f"{trainer.upper()}Config")(
        output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=6, logging_steps=1, save_strategy="no", report_to="none", beta=0.0, use_cpu=True,
        bf16=False, disable_tqdm=True,
    )  # fmt: skip
    model = make(tmp_path / "model")
    functions = [*rewards.values(), listener]
    made = getattr(trl, f"{trainer.upper()}Trainer")(
        model=str(model),
        reward_funcs=functions,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
    )
    made.train()
    (logged,) = (line for line in made.state.log_history if "loss" in line)
    (columns,) = heard
    assert {"completion_ids", column, "references"} <= columns.keys()
    texts = [completion[-1]["content"] for completion in columns["completions"]]
    assert all(isinstance(text, str) for text in texts)
    for name, reward in rewards.items():
        read = {name: columns[name] for name in ("references", "image_id", "questions")}
        alone = reward(None, texts, image=columns[column], **read)
        low, high = reward.bounds
        assert low <= min(alone) <= max(alone) <= high
        mean = logged[f"rewards/{reward.__name__}/mean"]
        assert mean == pytest.approx(sum(alone) / len(alone), rel=1e-5, abs=1e-7), name
    assert {"reward/cider", "reward/l_clipscore"} <= logged.keys(), (
        "the terms of a mixture are logged as well"
    )


@pytest.mark.parametrize("completion", [[], [{"role": "assistant"}], None])
def test_what_is_no_completion_is_named(completion):
    chat = [{"role": "user", "content": "x"}, {"content": "a"}]
    assert as_texts([chat, "b"]) == ["a", "b"]
    with pytest.raises(RewardError, match="completion 1 "):
        as_texts(["a dog", completion])


def test_an_image_may_be_in_a_list_of_one():
    image = noise_image(0)
    found = required_column({"images": [[image], "a.png"]}, "image", "r", 2)
    assert found == [image, "a.png"]
    for images in ([], [image, image]):
        with pytest.raises(RewardError, match="row 1 has no image, or several"):
            required_column({"images": [[image], images]}, "image", "r", 2)


def test_captions_without_eos_are_told_from_those_with_it():
    words = [[["a", "red", "circle"]], [["a", "blue", "square"]]]
    reward = CiderD(DocumentFrequencies.from_references(words, eos=True))
    texts, references = ["a red circle"] * 2, [["a red circle"]] * 2
    columns = {"references": references, "completion_ids": [[3, 7], [3, 4]]}
    told = FinishedAware(reward, [7])
    ended, cut = told(None, texts, **columns)
    assert ended == pytest.approx(10.0)
    assert cut < ended
    assert reward(None, texts, **columns) == [ended, ended]
    assert told(None, texts, **columns, finished=[False, False]) == [cut, cut]
    with pytest.raises(RewardError, match=r"term 'cider'.*needs.*column 'references'"):
        told(None, texts)
