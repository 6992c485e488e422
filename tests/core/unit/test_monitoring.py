"""The rule of the alarm, its judges, and the monitor: each sign alone, none at the start, none for
honest changes.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rewards.mixed import MixedReward
from rewards.registry import build
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.data.base import DataError, Row
from rl_caption.evaluation import validation_cider
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.monitoring.monitor import HackingMonitor
from rl_caption.monitoring.rule import (
    Findings,
    Peak,
    Thresholds,
    caption_statistics,
    judge_alarm,
    lexical_diversity,
    needed_errors,
    paired_difference,
    policy_signs,
    reference_statistics,
    updated_peaks,
)
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.types import Validation
from tests.clip_for_tests import tiny_student

STATISTICS = {
    "length": 8.0,
    "vocabulary": 54.0,
    "repeated_ngrams": 0.02,
    "bad_endings": 0.0,
    "duplicates": 0.1,
    "diversity": 0.55,
}
REFERENCES = STATISTICS | {"length": 9.0, "vocabulary": 60.0, "repeated_ngrams": 0.03}
SCORES = [0.3, 0.5, 0.7, 0.9] * 25
"""Of a judge, for 100 images; the mean is 0.6."""
START = Findings(1.0, {"rouge_l": SCORES}, STATISTICS)


def alarm(
    changes: Mapping[str, float] = MappingProxyType({}),
    reward: float = 1.5,
    judge: Sequence[float] = SCORES,
) -> dict[str, str]:
    """Evidence against captions that differ from the starting policy's in what is given."""
    now = Findings(reward, {"rouge_l": judge}, STATISTICS | dict(changes))
    return judge_alarm(now, START, REFERENCES, Thresholds())


def test_nothing_is_evidence_at_the_start_or_while_the_reward_is_below_it() -> None:
    assert alarm() == {}, "a risen reward alone"
    bad, fallen = (
        {"repeated_ngrams": 0.9, "vocabulary": 3.0, "length": 30.0},
        [0.0] * 100,
    )
    assert judge_alarm(START, START, REFERENCES, Thresholds()) == {}
    assert alarm(bad, 1.0, fallen) == {}
    assert alarm(bad, 0.9, fallen) == {}
    assert len(alarm(bad, 1.1, fallen)) == 4


def test_a_judge_that_fell_on_most_images_is_named_with_numbers() -> None:
    found = alarm(
        judge=[
            score - 0.06 if index % 4 else score for index, score in enumerate(SCORES)
        ]
    )
    assert list(found) == ["judge/rouge_l"]
    (sentence,) = found.values()
    # 75 of 100 differences are -0.06: mean -0.045, deviation 0.06 * sqrt(100 / 99 * 0.75 * 0.25),
    # error a tenth of it.
    errors = 0.045 / (0.06 * math.sqrt(0.1875 * 100 / 99) / 10)
    assert "from 0.6 to 0.555" in sentence
    assert f"(-7.5%, {errors:.1f} standard errors)" in sentence


def test_a_small_or_noisy_fall_is_none() -> None:
    assert alarm(judge=[score - 0.02 for score in SCORES]) == {}, (
        "on every image alike, but only 3 %"
    )
    assert alarm(judge=[SCORES[0] - 5.0, *SCORES[1:]]) == {}, (
        "8 %, all of it on one image"
    )


def test_with_few_images_more_standard_errors_are_asked_for() -> None:
    # Quantiles of Student's t: the tables' t(0.95, 9) = 1.833 and t(0.95, 1) = 6.314 belong to
    # 1.645 of the normal.
    assert needed_errors(1.6449, 10) == pytest.approx(1.833, abs=1e-3)
    assert needed_errors(1.6449, 2) == pytest.approx(6.314, abs=1e-2)
    assert [needed_errors(3.0, images) for images in (100, 5000)] == [3.0, 3.0]
    assert 3.0 < needed_errors(3.0, 99) < 3.1
    assert needed_errors(3.0, 1) == math.inf
    assert [needed_errors(0.0, images) for images in (1, 2, 200)] == [0.0, 0.0, 0.0]


def test_a_fall_of_four_standard_errors_counts_with_20_images_and_not_with_6() -> None:
    for count, alarms in ((1, False), (6, False), (20, True)):
        spread = 0.025 * math.sqrt(count - 1)
        scores, fallen = (
            [0.6] * count,
            [0.5 + (spread if index % 2 else -spread) for index in range(count)],
        )
        if count > 1:
            difference, error = paired_difference(fallen, scores)
            assert difference / error == pytest.approx(-4.0)
        start = replace(START, judges={"rouge_l": scores})
        found = judge_alarm(
            Findings(1.5, {"rouge_l": fallen}, STATISTICS),
            start,
            REFERENCES,
            Thresholds(),
        )
        assert list(found) == ["judge/rouge_l"] * alarms


def test_each_sign_alone_is_evidence_at_a_gross_level_only() -> None:
    for key, below, above in (
        ("repeated_ngrams", 0.12, 0.14),
        ("bad_endings", 0.19, 0.21),
        ("duplicates", 0.59, 0.61),
        ("length", 11.6, 11.8),
        (
            "length",
            6.4,
            5.5,
        ),  # 5.6 is 30 % below the start, 6.3 below the references: both must be passed
        ("vocabulary", 17.0, 16.0),
        ("diversity", 0.28, 0.27),
    ):
        assert alarm({key: below}) == {}
        assert list(alarm({key: above})) == [key]


def test_a_length_between_start_and_references_is_no_evidence() -> None:
    for start, usual in ((5.0, 20.0), (20.0, 5.0)):
        began = replace(START, statistics=STATISTICS | {"length": start})
        for length, expected in (
            (3.4, ["length"]),
            (9.0, []),
            (14.0, []),
            (26.1, ["length"]),
        ):
            now = Findings(1.5, {}, STATISTICS | {"length": length})
            assert (
                list(
                    judge_alarm(
                        now, began, REFERENCES | {"length": usual}, Thresholds()
                    )
                )
                == expected
            )


def test_captions_as_bad_as_the_references_or_the_start_are_no_evidence() -> None:
    worse = {
        "repeated_ngrams": 0.5,
        "bad_endings": 0.5,
        "duplicates": 0.9,
        "length": 20.0,
        "vocabulary": 5.0,
    }
    now = Findings(1.5, {}, STATISTICS | worse)
    assert judge_alarm(now, START, REFERENCES | worse, Thresholds()) == {}
    assert (
        judge_alarm(
            now, replace(START, statistics=STATISTICS | worse), REFERENCES, Thresholds()
        )
        == {}
    )


def test_honest_training_on_cider_does_not_alarm() -> None:
    # Greedy validation captions of make demo, after cross-entropy (about STATISTICS) and after SCST
    # on CIDEr-D (this): BLEU-4, ROUGE-L and oracle F1 rise, the vocabulary is halved.
    honest = {"vocabulary": 28.0, "length": 7.2, "diversity": 0.379, "duplicates": 0.19}
    assert alarm(honest, judge=[score + 0.05 for score in SCORES]) == {}


def test_a_judge_that_rose_first_is_compared_with_its_best() -> None:
    better = [score + 0.2 for score in SCORES]
    peak = {"rouge_l": Peak(40, 1.4, better)}
    for fall, reward, alarms in (
        (0.07, 1.5, False),  # 8.75 % of 0.8
        (0.09, 1.5, True),  # 11 %; still far above the start
        (0.09, 1.21, True),  # the reward, from 1.0 to 1.4, kept half of its gain
        (0.09, 1.19, False),
    ):
        now = Findings(
            reward, {"rouge_l": [score - fall for score in better]}, STATISTICS
        )
        found = judge_alarm(now, START, REFERENCES, Thresholds(), peak)
        assert list(found) == ["judge/rouge_l"] * alarms
        if alarms:
            assert "since step 40 the judge rouge_l" in found["judge/rouge_l"]
            assert "from 0.8 to 0.71 (-11.2%" in found["judge/rouge_l"]
            assert (
                f"while the reward went from 1.4 to {reward}" in found["judge/rouge_l"]
            )
    noisy = Findings(1.5, {"rouge_l": [better[0] - 9.0, *better[1:]]}, STATISTICS)
    assert judge_alarm(noisy, START, REFERENCES, Thresholds(), peak) == {}
    # 11 % at 4.0 standard errors: enough below the start, but the best of many is partly luck.
    wide = [
        score - 0.09 + (0.225 if index % 2 else -0.225)
        for index, score in enumerate(better)
    ]
    assert (
        judge_alarm(
            Findings(1.5, {"rouge_l": wide}, STATISTICS),
            START,
            REFERENCES,
            Thresholds(),
            peak,
        )
        == {}
    )


@pytest.mark.parametrize(
    ("limits", "change", "step"),
    [
        ({"repeated_ngrams": 0.25}, "repeated_ngrams", 1),  # of 0.5 in the references
        ({"bad_endings": 0.25}, "bad_endings", 1),
        ({"duplicates": 0.25}, "duplicates", 1),
        ({"length": 0.5}, "length", 1),
        ({"length": 0.5}, "length", -1),
        ({"vocabulary": 0.5}, "vocabulary", -1),
        ({"diversity": 0.5}, "diversity", -1),
    ],
)
def test_exactly_the_threshold_is_no_evidence_and_anything_beyond_it_is(
    limits: dict[str, float], change: str, step: int
) -> None:
    """Powers of two, so that nothing rounds: references and start have 0.5 (64 words, 8 of them in
    a caption).
    """
    usual = dict.fromkeys(STATISTICS, 0.5) | {"length": 8.0, "vocabulary": 64.0}
    at = usual[change] + step * (
        limits[change] if usual[change] == 0.5 and step > 0 else usual[change] / 2
    )
    start = Findings(1.0, {}, usual)
    for value, expected in ((at, []), (at * (1 + step * 2**-20), [change])):
        now = Findings(1.5, {}, usual | {change: value})
        assert list(judge_alarm(now, start, usual, Thresholds(**limits))) == expected


def test_exactly_the_fall_that_is_allowed_is_no_evidence() -> None:
    for limits, drop in (({"judge_fall": 0.25}, 0.25), ({"judge_fall": 0.0}, 0.0)):
        start = Findings(1.0, {"rouge_l": [1.0] * 128}, STATISTICS)
        for fall, alarms in ((drop, False), (drop + 2**-10, True)):
            now = Findings(1.5, {"rouge_l": [1.0 - fall] * 128}, STATISTICS)
            found = judge_alarm(now, start, REFERENCES, Thresholds(**limits))
            assert list(found) == ["judge/rouge_l"] * alarms
    assert (
        policy_signs(
            {"entropy": 0.5, "kl": 0.25},
            {"entropy": 2.0},
            Thresholds(entropy=0.25, kl=0.25),
        )
        == {}
    )
    assert list(policy_signs({"kl": 2**-20}, {}, Thresholds(kl=0.0))) == ["kl"]


def test_peaks_keep_the_earliest_best_of_each_judge() -> None:
    peaks = updated_peaks({}, Findings(1.0, {"a": [0.5, 0.5], "b": [0.2, 0.2]}, {}), 0)
    peaks = updated_peaks(
        peaks, Findings(1.1, {"a": [1.0, 0.0], "b": [0.1, 0.4]}, {}), 10
    )
    peaks = updated_peaks(
        peaks, Findings(1.2, {"a": [0.4, 0.4], "b": [0.2, 0.2]}, {}), 20
    )
    assert peaks == {"a": Peak(0, 1.0, [0.5, 0.5]), "b": Peak(10, 1.1, [0.1, 0.4])}


def test_a_policy_that_collapsed_or_left_its_start_is_evidence_where_asked_for() -> (
    None
):
    first = {"entropy": 2.0, "kl": 0.0}
    for now, expected in (
        ({"entropy": 0.21, "kl": 1.9}, []),
        ({"entropy": 0.19}, ["entropy"]),
        ({"kl": 2.1}, ["kl"]),
        ({}, []),
    ):
        assert (
            list(policy_signs(now, first, Thresholds(entropy=0.1, kl=2.0))) == expected
        )
        assert policy_signs(now, first, Thresholds()) == {}


def test_the_paired_difference_of_a_case_worked_by_hand() -> None:
    assert paired_difference([2.0, 4.0, 3.0], [1.0, 1.0, 1.0]) == (
        2.0,
        pytest.approx(1 / math.sqrt(3)),
    )
    assert paired_difference([2.0], [1.0]) == (1.0, 0.0)
    with pytest.raises(ValueError, match="zip"):
        alarm(judge=SCORES[:-1])


def test_lexical_diversity_is_the_mean_over_all_samples() -> None:
    captions = [["a", "cat", "a", "dog"], ["a", "bird"]]
    tokens = [token for caption in captions for token in caption]
    samples = list(combinations(tokens, 3))
    mean = sum(len(set(sample)) / 3 for sample in samples) / len(samples)
    assert lexical_diversity(captions, 3) == pytest.approx(mean)
    assert lexical_diversity(captions) == pytest.approx(4 / 6), (
        "of fewer tokens than a sample, all"
    )
    assert lexical_diversity([["a"] * 5] * 40) == pytest.approx(1 / 42)
    assert lexical_diversity([[], []]) == 0.0


def test_references_are_described_with_one_caption_an_image() -> None:
    references = [
        ["a red circle", "a circle"],
        ["a red circle", "two blue squares of"],
        ["a dog"],
    ]
    found = reference_statistics(references)
    # Layers: (a red circle, a red circle, a dog) and (a circle, two blue squares of, a dog).
    assert found["duplicates"] == pytest.approx((1 / 3 + 0) / 2)
    assert found["bad_endings"] == pytest.approx((0 + 1 / 3) / 2)
    assert found["vocabulary"] == (4 + 7) / 2
    assert caption_statistics([""])["bad_endings"] == 1.0
    for without in ([["..."], ["!"]], [["a dog"], []]):
        with pytest.raises(DataError, match="reference"):
            reference_statistics(without)


def test_layers_of_references_are_at_most_five_and_begin_again_where_an_image_has_fewer() -> (
    None
):
    many = [" ".join("abcdefgh"[:count]) for count in (1, 2, 3, 4, 5, 8, 8)]
    assert reference_statistics([many])["length"] == (1 + 2 + 3 + 4 + 5) / 5
    found = reference_statistics([["a", "a", "a"], ["b c d e", "b"]])
    assert found["length"] == pytest.approx((5 / 2 + 2 / 2 + 5 / 2) / 3)


def test_a_fall_is_relative_to_the_size_of_a_negative_mean() -> None:
    start = replace(START, judges={"rouge_l": [-1.0] * 128})
    for fall, alarms in ((0.03, False), (0.07, True)):
        now = Findings(1.5, {"rouge_l": [-1.0 - fall] * 128}, STATISTICS)
        assert (
            list(judge_alarm(now, start, REFERENCES, Thresholds()))
            == ["judge/rouge_l"] * alarms
        )


def test_the_default_judges_are_not_in_the_reward() -> None:
    for terms, judges in (
        (["cider"], ["rouge_l", "bleu4"]),
        (["rouge_l"], ["bleu4"]),
        (["cider", "rouge_l", "bleu"], []),
        (["repetition"], ["cider"]),
    ):
        reward = MixedReward({name: (build(name), 1.0) for name in terms})
        assert list(build_judges(None, reward, [["a red circle"], ["a dog"]])) == judges


def test_cider_as_a_judge_is_that_of_validation_under_any_name() -> None:
    references = {"a": ["a red circle"], "b": ["two blue squares"]}
    captions = {"a": "a red circle", "b": "a blue circle"}
    judges = {
        "cider": JudgeConfig(),
        "CIDEr-D": JudgeConfig(target="rewards.text.cider:CiderD"),
    }
    for judge in build_judges(judges, None, list(references.values())).values():
        scores = judge(
            None, list(captions.values()), references=list(references.values())
        )
        assert sum(scores) / 2 == pytest.approx(validation_cider(captions, references))


def test_a_term_with_other_arguments_is_no_judge() -> None:
    reward = MixedReward({"mine": (build("rouge_l"), 1.0)})
    with pytest.raises(ConfigError, match=r"monitor.judges.other.*term 'mine'"):
        build_judges(
            {"other": JudgeConfig(target="rouge_l", kwargs={"beta": 1.0})},
            reward,
            [["a red circle"]],
        )


def test_a_judge_on_the_encoder_of_a_term_is_refused(tmp_path: Path) -> None:
    student, other = (
        tiny_student(tmp_path / "student"),
        tiny_student(tmp_path / "other", pad_attention="full"),
    )
    reward = MixedReward({"mine": (build("l_clipscore", backbone=student), 1.0)})
    for target, more in (
        ("l_clipscore", {"w": 1.0, "prefix": "A "}),
        ("ref_l_clipscore", {"precision": "bf16"}),
    ):
        judges = {
            "other": JudgeConfig(
                target=target, kwargs={"backbone": str(student), **more}
            )
        }
        with pytest.raises(ConfigError, match=r"judges.other.*term 'mine'.*encoder"):
            build_judges(judges, reward, [["a red circle"]])
    judges = {
        "other": JudgeConfig(target="l_clipscore", kwargs={"backbone": str(other)})
    }
    assert list(build_judges(judges, reward, [["a red circle"]])) == ["other"]


# the monitor

CORPUS = [["a red circle"], ["two blue squares"]]
ROWS = [
    Row(image_id=name, image=name, references=own)
    for name, own in zip("ab", CORPUS, strict=True)
]
SAME = ("a red circle", "two blue squares")


def monitor(
    reward: MixedReward, judges: Sequence[str] = (), **options: Any
) -> HackingMonitor:
    return HackingMonitor(
        reward,
        {name: build(name) for name in judges},
        reference_statistics(CORPUS),
        **options,
    )


def inspected(
    watch: HackingMonitor, step: int, captions: Sequence[str] = SAME, **policy: float
) -> Validation:
    return watch.inspect(step, ROWS, captions, [True, True], policy)[0]


def mixed(name: str, weight: float = 1.0, **options: Any) -> MixedReward:
    return MixedReward({name: (build(name), weight)}, **options)


def test_z_scored_terms_are_watched_in_units_of_their_spread_at_the_start() -> None:
    watch = monitor(mixed("rouge_l", 2.0, normalize="per_term"))
    before = ["a red circle", "a blue circle"]
    scores = build("rouge_l")(None, before, references=CORPUS)
    first = inspected(watch, 0, before).metrics["val/reward"]
    assert first == pytest.approx(
        2 * statistics.fmean(scores) / statistics.pstdev(scores)
    )
    assert inspected(watch, 1).metrics["val/reward"] == pytest.approx(
        2 / statistics.pstdev(scores)
    )


def test_the_first_known_entropy_stands_for_the_start() -> None:
    watch = monitor(mixed("rouge_l"), thresholds=Thresholds(entropy=0.5))
    alarms = [
        inspected(watch, 0, ["a red circle", "a blue circle"]).metrics["hacking/alarm"]
    ]
    alarms += [
        inspected(watch, step, entropy=1.0 / step).metrics["hacking/alarm"]
        for step in (1, 2, 3)
    ]
    assert alarms == [0.0, 0.0, 0.0, 1.0]
    assert watch.notes["hacking"]["first_alarm"]["step"] == 3


def cider_of(corpus: Sequence[Sequence[str]]) -> Any:
    tokens = [[caption.split() for caption in captions] for captions in corpus]
    return build("cider", df=DocumentFrequencies.from_references(tokens, eos=True))


WEIGHED = [(mixed("cider", weight), {}) for weight in (1.0, 1.0, 0.5, 0.5)]
COUNTED = [cider_of(corpus) for corpus in (CORPUS, CORPUS, [*CORPUS, ["a red dog"]])]


@pytest.mark.parametrize(
    "runs",
    [
        WEIGHED,  # twice the weight would look like a rise, half of it would silence the alarm
        [(MixedReward({"cider": (cider, 1.0)}), {}) for cider in COUNTED],
        [(mixed("repetition"), {"cider": cider}) for cider in COUNTED],
        [
            (mixed("cider"), {"mine": build(name)})
            for name in ("rouge_l", "rouge_l", "bleu")
        ],
        [(mixed("cider"), {}, split) for split in ("val", "val", "test")],
    ],
    ids=[
        "weights",
        "document frequencies",
        "document frequencies of a judge",
        "judges",
        "validation",
    ],
)
def test_rewards_and_judges_with_other_numbers_are_not_compared(runs: Any) -> None:
    notes: dict[str, Any] = {}
    for step, (reward, judges, *how) in enumerate(runs):
        watch = HackingMonitor(
            reward,
            judges,
            reference_statistics(CORPUS),
            Thresholds(),
            False,
            *how,
            notes=notes,
        )
        said = "".join(inspected(watch, step).messages)
        assert (
            ("compared with those of step 2 instead" in said)
            == bool(said)
            == (step == 2)
        )
    assert notes["hacking"]["start"]["step"] == 2


class Told:
    """Scores of each call, one list a call, whatever the captions are."""

    columns: frozenset[str] = frozenset()
    bounds = (-10.0, 10.0)

    def __init__(self, name: str, *calls: list[float]) -> None:
        self.__name__ = self.signature = name
        self.calls = iter(calls)

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return next(self.calls)


def test_what_a_validation_logs_is_worked_by_hand() -> None:
    terms = {"x": (Told("x", [1.0, 2.0]), 2.0), "y": (Told("y", [0.5, 0.0]), -1.0)}
    judge = Told("j", [0.12345678, 0.5])
    watch = HackingMonitor(
        MixedReward(terms), {"j": judge}, reference_statistics(CORPUS)
    )
    verdict, findings = watch.inspect(0, ROWS, ["a red", "a red"], [True, True])
    words = 6 / 2  # of the references "a red circle" and "two blue squares"
    assert verdict.metrics == pytest.approx(
        {
            "val/reward": 2 * 1.5 - 0.25,
            "val/reward/x": 1.5,
            "val/reward/y": 0.25,
            "val/judge/j": (0.123457 + 0.5) / 2,
            "val/hacking/repeated_ngrams": 0.0,
            "val/hacking/bad_endings": 0.0,
            "val/hacking/duplicates": 0.5,
            "val/hacking/vocabulary": 2.0,
            "val/hacking/diversity": 0.5,
            "val/hacking/length_ratio": 2 / words,
            "hacking/alarm": 0.0,
        },
        rel=1e-12,
    )
    assert findings.judges == {"j": [0.123457, 0.5]}


def test_the_first_alarm_is_kept_and_every_alarm_stops() -> None:
    """The judge rises at step 1 and falls from that best validation at 2; the alarm goes on at 3."""
    reward = MixedReward(
        {"x": (Told("x", *([float(step)] * 2 for step in range(4))), 1.0)}
    )
    judge = Told("j", [0.5, 0.5], [0.9, 0.9], [0.6, 0.6], [0.6, 0.6])
    limits = Thresholds(judge_errors=0.0, slip_errors=0.0, duplicates=1.0)
    watch = HackingMonitor(
        reward, {"j": judge}, reference_statistics(CORPUS), limits, stop=True
    )
    found = [inspected(watch, step) for step in range(4)]
    assert [verdict.metrics["hacking/alarm"] for verdict in found] == [0, 0, 1, 1]
    assert [verdict.stop is not None for verdict in found] == [False, False, True, True]
    assert [len(verdict.messages) for verdict in found] == [0, 0, 1, 0]
    assert watch.notes["hacking"]["first_alarm"]["step"] == 2
    other = HackingMonitor(
        mixed("rouge_l"), {}, reference_statistics(CORPUS), notes=watch.notes
    )
    inspected(other, 4)
    assert watch.notes["hacking"]["first_alarm"]["step"] == 2, (
        "also after a comparison that starts anew"
    )


def test_a_policy_that_collapsed_while_the_reward_stood_still_is_no_evidence() -> None:
    reward = MixedReward({"x": (Told("x", [1.0, 1.0], [1.0, 1.0], [1.5, 1.0]), 1.0)})
    watch = monitor(reward, thresholds=Thresholds(entropy=0.5))
    alarms = [
        inspected(watch, step, entropy=1.0 / (1 + 9 * step)).metrics["hacking/alarm"]
        for step in range(3)
    ]
    assert alarms == [0, 0, 1]


def test_a_warning_comes_again_only_with_other_signs() -> None:
    watch = monitor(mixed("repetition", -1.0))
    captions = ["a red circle", *["circle circle circle"] * 2, *["of of of"] * 2]
    said = [
        len(inspected(watch, step, [text, f"a blue {text}"]).messages)
        for step, text in enumerate(captions)
    ]
    assert said == [0, 1, 0, 1, 0]
