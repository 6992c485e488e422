"""judge.py: metrics against human judgements, from the command line to the tables."""

from pathlib import Path

import pytest

from rewards.base import RewardError
from rewards.files import load_json
from rewards.images import frames_of
from rewards.videos import VideoFrame
from rl_caption.cli.main import main
from rl_caption.evaluation import metrics as metrics_module
from rl_caption.evaluation.toolkit import Scores
from rl_caption.lab.config import JudgeSetConfig
from rl_caption.lab.meta_evaluation.program import (
    ToolkitMetric,
    build_metrics,
    compare_with_people,
    score_set,
)
from rl_caption.lab.meta_evaluation.sets import load
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import ConfigError
from tests.clip_for_tests import noise_image, tiny_student
from tests.judgement_sets_for_tests import BUILDERS

GOLDEN = load_json(Path(__file__).parents[1] / "golden" / "flickr8k_agreement.json")[
    "cases"
]


class Length:
    """The number of words; counts its texts."""

    __name__ = signature = "length"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, float("inf"))

    def __init__(self) -> None:
        self.scored: list[str] = []

    def __call__(self, prompts, completions, **columns):
        self.scored += completions
        return [float(len(text.split())) for text in completions]


class FailsOnPairs(Length):
    """Fails on any set but the first that it is given."""

    def __call__(self, prompts, completions, **columns):
        if self.scored:
            raise RewardError("out of memory")
        return super().__call__(prompts, completions, **columns)


def config(folder, name, **changes):
    BUILDERS[name](folder)
    values = {
        "set": name,
        "data": str(folder),
        "partial": True,
        "bootstrap": 0,
    }
    return JudgeSetConfig(**(values | {"out": str(folder / "out")} | changes))


def content(folder):
    return load_json(folder / "out" / "agreement.json")


def test_the_command_line_writes_tables(tmp_path, capsys):
    BUILDERS["flickr8k_expert"](tmp_path)
    words = "--set flickr8k_expert --metrics rouge,cider --partial true --bootstrap 20"
    words += f" --data {tmp_path} --out {tmp_path / 'out'}"
    words += f" --judges.mine.target {__name__}:Length"
    assert main(["judge", *words.split()]) == 0
    shown = capsys.readouterr().out
    assert "not defined" in shown, "all captions have six words"
    assert shown.strip() == (tmp_path / "out" / "agreement.md").read_text().strip()
    (found,) = content(tmp_path)["sets"]
    assert found["figures"].keys() == {"ROUGE-L", "CIDEr", "mine"}
    assert found["figures"]["mine"][0]["value"] is None
    assert found["excluded"] == {"the caption is one of the image's references": 3}
    assert content(tmp_path)["config"]["metrics"] == "rouge,cider"


@pytest.mark.parametrize(
    ("name", "columns", "count"),
    [("flickr8k_expert", set(), 2), ("pascal50s", {"references"}, 5 * 2 * 4)],
)
def test_equal_rows_are_scored_once(tmp_path, name, columns, count):
    """Three experts rated each of two captions; a draw shows other references."""
    BUILDERS[name](tmp_path)
    (part,) = load(name, tmp_path, partial=True)
    metric = Length()
    metric.columns = frozenset(columns)
    score_set(part, metric)
    assert len(metric.scored) == count


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return tiny_student(tmp_path_factory.mktemp("student"))


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("aro", "l_clipscore"),
        ("sugarcrepe_pp", "l_clipscore"),
        ("pascal50s", "ref_l_clipscore"),
        ("vatex_eval", "ref_l_clipscore"),
        ("activitynet_foil", "ref_l_clipscore"),
    ],
)
def test_scores_of_images_regions_and_frames(tmp_path, student, name, reward):
    BUILDERS[name](tmp_path)
    photos = tmp_path / "photos"
    parts = load(name, tmp_path, photos, partial=True)
    images = [image for part in parts for image in part.images]
    for image in images:
        for number, frame in enumerate(frames_of(image)):
            file = Path(getattr(frame, "path", frame))
            if isinstance(frame, VideoFrame):
                file = file.with_suffix("") / f"{number}.png"  # a folder of frames
            file.parent.mkdir(parents=True, exist_ok=True)
            noise_image(number).save(file)
    judges = {reward: JudgeConfig(kwargs={"backbone": str(student)})}
    options = {"metrics": "", "judges": judges, "images": str(photos)}
    compare_with_people(config(tmp_path, name, **options))
    for found in content(tmp_path)["sets"]:
        figures = found["figures"][reward]
        assert all(figure["count"] > 0 for figure in figures)
        assert any(figure["value"] is not None for figure in figures), found["name"]
        names = {figure["name"][:3] for figure in figures}
        assert ("TOT" in names) == (name == "sugarcrepe_pp"), "by the text encoder"


def test_a_metric_without_what_it_needs_is_refused(tmp_path, student):
    with pytest.raises(ConfigError, match=r"CIDEr.*sugarcrepe"):
        compare_with_people(config(tmp_path, "sugarcrepe", metrics="cider"))
    twice = {"length": JudgeConfig(target=f"{__name__}:Length")}
    with pytest.raises(ConfigError, match=r"length.*another heading"):
        compare_with_people(config(tmp_path, "foil", metrics="length", judges=twice))
    clip = JudgeConfig(target="l_clipscore", kwargs={"backbone": str(student)})
    settings = config(tmp_path, "sugarcrepe", metrics="", judges={"clip": clip})
    with pytest.raises(ConfigError, match="clip needs images, which sugarcrepe"):
        compare_with_people(settings)
    (tmp_path / "val2017").mkdir()
    with pytest.raises(ConfigError, match=r"2 of 2.*'.*000000000001\.jpg'"):
        compare_with_people(settings)


def test_without_java_meteor_is_left_out_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = compare_with_people(
        config(tmp_path, "flickr8k_expert", metrics="rouge,meteor")
    )
    assert "| METEOR | – | – |" in shown
    assert "no Java" in content(tmp_path)["sets"][0]["signatures"]["METEOR"]


def test_the_generated_world(tmp_path):
    """And a metric that fails late leaves the finished figures."""
    judges = {
        name: JudgeConfig(target=f"{__name__}:{kind}")
        for name, kind in (("late", "FailsOnPairs"), ("next", "Length"))
    }
    settings = JudgeSetConfig(
        set="scenes",
        metrics="rouge",
        judges=judges,
        bootstrap=0,
        set_kwargs={"num_images": 12},
        out=str(tmp_path / "out"),
    )
    with pytest.raises(RewardError, match=r"^late.* hard negatives"):
        compare_with_people(settings)
    rated, pairs = content(tmp_path)["sets"]
    assert pairs["figures"]["ROUGE-L"][-1]["name"] == "all pairs"
    assert list(rated["figures"]) == ["ROUGE-L", "late", "next"]
    assert list(pairs["figures"]) == ["ROUGE-L"]


@pytest.mark.slow
def test_the_published_tables_of_flickr8k(shared_data):
    made = build_metrics("bleu,rouge,cider", {})
    for case, names in zip(
        GOLDEN,
        (
            [
                "BLEU-1",
                "BLEU-4",
                "ROUGE-L",
                "CIDEr",
            ],
            ["ROUGE-L"],
        ),
        strict=True,
    ):
        (part,) = load(case["set"], shared_data / "flickr8k")
        for name in names:
            figures = score_set(part, made[name])
            assert (figures[0].name, figures[0].published) == (case["published"], True)
            for figure in figures[:2]:
                assert figure.count == case["judgements"]
                difference = 100 * figure.value - case[figure.name][name]
                assert abs(difference) < 0.0006, "three decimals are printed"
                assert abs(difference + 0.002) > 0.0006, (
                    "a perturbed last digit would be seen"
                )


def test_meteor_of_single_captions_is_of_their_tokens(monkeypatch):
    def meteor(candidates, references):
        assert list(candidates.values()) == ["a dog", "a cat"]
        assert list(references.values()) == [["dogs"], ["cats"]]
        return Scores({"METEOR": (0.5, [0.1, 0.2])})

    monkeypatch.setitem(metrics_module.SCORERS, "meteor", meteor)
    references = [["Dogs."], ["Cats"]]
    scores = ToolkitMetric("meteor")(None, ["A dog.", "A cat!"], references=references)
    assert scores == pytest.approx([0.1, 0.2])
