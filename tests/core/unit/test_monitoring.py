"""The rule of the alarm, its judges, and the monitor: each sign alone, none at the
start, none for honest changes.
"""

import math
import statistics
from itertools import combinations

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
)
from rl_caption.runtime.errors import ConfigError
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


def alarm(
    changes=None, reward=1.5, judge=SCORES, began=SCORES, peaks=None, **thresholds
):
    """Evidence against captions that differ from the starting policy's in what is given."""
    start = Findings(1.0, {"rouge_l": began}, STATISTICS)
    now = Findings(reward, {"rouge_l": judge}, STATISTICS | (changes or {}))
    return judge_alarm(now, start, REFERENCES, Thresholds(**thresholds), peaks)


def test_nothing_is_evidence_at_the_start_or_while_the_reward_is_below_it():
    assert alarm() == {}
    bad = {"repeated_ngrams": 0.9, "vocabulary": 3.0, "length": 30.0}
    fallen = [0.0] * 100
    assert alarm(bad, 1.0, fallen) == {}
    assert alarm(bad, 0.9, fallen) == {}
    assert len(alarm(bad, 1.1, fallen)) == 4


def test_a_judge_that_fell_on_most_images_is_named_and_a_small_or_noisy_fall_is_none():
    fallen = [score - 0.06 * (index % 4 > 0) for index, score in enumerate(SCORES)]
    found = alarm(judge=fallen)
    assert list(found) == ["judge/rouge_l"]
    assert "from 0.6 to 0.555 (-7.5%, 17.2 s" in found["judge/rouge_l"]
    # 3 % everywhere; 8 %, all of it on one image
    assert alarm(judge=[score - 0.02 for score in SCORES]) == {}
    assert alarm(judge=[SCORES[0] - 5.0, *SCORES[1:]]) == {}


def test_with_few_images_more_standard_errors_are_asked_for():
    # Quantiles of Student's t: the tables' t(0.95, 9) = 1.833 and t(0.95, 1) = 6.314 belong to
    # 1.645 of the normal.
    assert needed_errors(1.6449, 10) == pytest.approx(1.833, abs=1e-3)
    assert needed_errors(1.6449, 2) == pytest.approx(6.314, abs=1e-2)
    assert needed_errors(3.0, 100) == 3.0 < needed_errors(3.0, 99) < 3.1
    assert needed_errors(3.0, 1) == math.inf
    assert needed_errors(0.0, 1) == needed_errors(0.0, 2) == 0.0


@pytest.mark.parametrize(("count", "expected"), [(1, False), (6, False), (20, True)])
def test_a_fall_of_four_standard_errors_counts_with_20_images_and_not_with_6(
    count, expected
):
    spread = 0.025 * math.sqrt(count - 1)
    fallen = [0.5 + spread * (-1) ** (index + 1) for index in range(count)]
    assert bool(alarm(judge=fallen, began=[0.6] * count)) == expected


@pytest.mark.parametrize(
    ("key", "below", "above"),
    [
        ("repeated_ngrams", 0.12, 0.14),
        ("bad_endings", 0.19, 0.21),
        ("duplicates", 0.59, 0.61),
        ("length", 11.6, 11.8),
        # 5.6 is 30 % below the start, 6.3 below the references: both must be passed
        ("length", 6.4, 5.5),
        ("vocabulary", 17.0, 16.0),
        ("diversity", 0.28, 0.27),
    ],
)
def test_each_sign_alone_is_evidence_at_a_gross_level_only(key, below, above):
    assert alarm({key: below}) == {}
    assert list(alarm({key: above})) == [key]


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize(
    ("key", "one", "other", "limit", "allowed"),
    [
        ("repeated_ngrams", 0.5, 0.125, 0.25, 0.75),
        ("length", 8.0, 32.0, 0.5, 48.0),
        ("length", 8.0, 32.0, 0.5, 4.0),
        ("vocabulary", 64.0, 128.0, 0.5, 32.0),
    ],
)
def test_a_sign_must_pass_the_limits_of_both_the_start_and_the_references(
    key, one, other, limit, allowed, exchanged
):
    """Powers of two, so that nothing rounds: exactly the threshold is no evidence."""
    began, usual = (other, one) if exchanged else (one, other)
    start = Findings(1.0, {}, STATISTICS | {key: began})
    references = STATISTICS | {key: usual}
    step = 2**-20 if allowed > max(one, other) else -(2**-20)
    beyond = allowed * (1 + step)
    for value, expected in (((one + other) / 2, []), (allowed, []), (beyond, [key])):
        now = Findings(1.5, {}, STATISTICS | {key: value})
        found = judge_alarm(now, start, references, Thresholds(**{key: limit}))
        assert list(found) == expected


@pytest.mark.parametrize(("limit", "sign"), [(0.25, 1), (0.25, -1), (0.0, 1)])
def test_exactly_the_fall_that_is_allowed_is_no_evidence(limit, sign):
    """A fall is relative to the size of a mean, which may be negative."""
    began = [sign * 1.0] * 128
    for fall, expected in ((limit, False), (limit + 2**-10, True)):
        fallen = [score - fall for score in began]
        assert bool(alarm(judge=fallen, began=began, judge_fall=limit)) == expected


def test_a_judge_that_rose_first_is_compared_with_its_best():
    better = [score + 0.2 for score in SCORES]
    peak = {"rouge_l": Peak(40, 1.4, better)}
    for fall, reward, expected in (
        (0.07, 1.5, False),  # 8.75 % of 0.8
        (0.09, 1.5, True),  # 11 %; still far above the start
        (0.09, 1.21, True),  # the reward, from 1.0 to 1.4, kept half of its gain
        (0.09, 1.19, False),
    ):
        fallen = [score - fall for score in better]
        found = alarm(reward=reward, judge=fallen, peaks=peak)
        assert bool(found) == expected
        if expected:
            assert "since step 40" in found["judge/rouge_l"]
    # 11 % at 4.0 standard errors: enough below the start, but the best of many is partly luck.
    noise = [0.225 * (-1) ** (index + 1) for index in range(100)]
    wide = [score - 0.09 + own for score, own in zip(better, noise, strict=True)]
    assert alarm(judge=wide, peaks=peak) == {}


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"entropy": 0.5, "kl": 0.25}, []),
        ({"entropy": 0.49}, ["entropy"]),
        ({"kl": 0.26}, ["kl"]),
        ({}, []),
    ],
)
def test_a_policy_that_collapsed_or_left_its_start_is_evidence_where_asked_for(
    now, expected
):
    first = {"entropy": 2.0, "kl": 0.0}
    limits = Thresholds(entropy=0.25, kl=0.25)
    assert list(policy_signs(now, first, limits)) == expected
    assert policy_signs(now, first, Thresholds()) == {}


def test_the_paired_difference_of_a_case_worked_by_hand():
    found = paired_difference([2.0, 4.0, 3.0], [1.0, 1.0, 1.0])
    assert found == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert paired_difference([2.0], [1.0]) == (1.0, 0.0)


def test_lexical_diversity_is_the_mean_over_all_samples():
    captions = [["a", "cat", "a", "dog"], ["a", "bird"]]
    tokens = [token for caption in captions for token in caption]
    samples = list(combinations(tokens, 3))
    mean = sum(len(set(sample)) / 3 for sample in samples) / len(samples)
    assert lexical_diversity(captions, 3) == pytest.approx(mean)
    # fewer tokens than a sample
    assert lexical_diversity(captions) == pytest.approx(4 / 6)
    assert lexical_diversity([["a"] * 5] * 40) == pytest.approx(1 / 42)
    assert lexical_diversity([[], []]) == 0.0


def test_references_are_described_with_one_caption_an_image():
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
    with pytest.raises(DataError, match="reference"):
        reference_statistics([["a dog"], []])


def test_layers_of_references_are_at_most_five_and_begin_again_where_an_image_has_fewer():
    many = [" ".join("abcdefgh"[:count]) for count in (1, 2, 3, 4, 5, 8, 8)]
    assert reference_statistics([many])["length"] == (1 + 2 + 3 + 4 + 5) / 5
    found = reference_statistics([["a", "a", "a"], ["b c d e", "b"]])
    assert found["length"] == pytest.approx((5 / 2 + 2 / 2 + 5 / 2) / 3)


@pytest.mark.parametrize(
    ("terms", "judges"),
    [
        (["cider"], ["rouge_l", "bleu4"]),
        (["cider", "rouge_l", "bleu"], []),
        (["repetition"], ["cider"]),
    ],
)
def test_the_default_judges_are_not_in_the_reward(terms, judges):
    reward = MixedReward({name: (build(name), 1.0) for name in terms})
    assert list(build_judges(None, reward, CORPUS)) == judges


def test_cider_as_a_judge_is_that_of_validation_under_any_name():
    captions = ["a red circle", "a blue circle"]
    judges = {
        "cider": JudgeConfig(),
        "CIDEr-D": JudgeConfig(target="rewards.text.cider:CiderD"),
    }
    expected = validation_cider(dict(enumerate(captions)), dict(enumerate(CORPUS)))
    for judge in build_judges(judges, None, CORPUS).values():
        scores = judge(None, captions, references=CORPUS)
        assert sum(scores) / 2 == pytest.approx(expected)


def test_a_term_with_other_arguments_or_on_the_same_encoder_is_no_judge(tmp_path):
    student = tiny_student(tmp_path / "student")
    other = tiny_student(tmp_path / "other", pad_attention="full")
    mine = build("l_clipscore", backbone=student)
    reward = MixedReward({"words": (build("rouge_l"), 1.0), "mine": (mine, 1.0)})

    def judged(target, **kwargs):
        judges = {"other": JudgeConfig(target=target, kwargs=kwargs)}
        return list(build_judges(judges, reward, CORPUS))

    with pytest.raises(ConfigError, match=r"monitor.judges.other.*term 'words'"):
        judged("rouge_l", beta=1.0)
    with pytest.raises(ConfigError, match="term 'mine'"):
        judged("ref_l_clipscore", precision="bf16", backbone=str(student))
    assert judged("l_clipscore", backbone=str(other)) == ["other"]


# the monitor

CORPUS = [["a red circle"], ["two blue squares"]]
ROWS = [
    Row(image_id=name, image=name, references=own)
    for name, own in zip("ab", CORPUS, strict=True)
]
SAME = ("a red circle", "two blue squares")


def monitor(reward, judges=None, **options):
    """A monitor of two images."""
    return HackingMonitor(reward, judges or {}, reference_statistics(CORPUS), **options)


def inspected(watch, step, captions=SAME, **policy):
    """What the monitor says of captions of ``ROWS``."""
    return watch.inspect(step, ROWS, captions, [True, True], policy)[0]


def mixed(name, weight=1.0, **options):
    return MixedReward({name: (build(name), weight)}, **options)


class Told:
    """Scores of each call, one list a call, whatever the captions are."""

    columns = frozenset()
    bounds = (-10.0, 10.0)

    def __init__(self, name, *calls):
        self.__name__ = self.signature = name
        self.calls = iter(calls)

    def __call__(self, prompts, completions, **columns):
        return next(self.calls)


def test_z_scored_terms_are_watched_in_units_of_their_spread_at_the_start():
    watch = monitor(mixed("rouge_l", 2.0, normalize="per_term"))
    before = ["a red circle", "a blue circle"]
    scores = build("rouge_l")(None, before, references=CORPUS)
    spread = statistics.pstdev(scores)
    first = inspected(watch, 0, before).metrics["val/reward"]
    assert first == pytest.approx(2 * statistics.fmean(scores) / spread)
    second = inspected(watch, 1).metrics["val/reward"]
    assert second == pytest.approx(2 / spread)


def test_the_first_known_entropy_stands_for_the_start_and_counts_with_a_risen_reward():
    def alarms(totals, entropies):
        told = Told("x", *([total] * 2 for total in totals))
        reward, limits = MixedReward({"x": (told, 1.0)}), Thresholds(entropy=0.5)
        watch = monitor(reward, thresholds=limits)
        found = []
        for step, entropy in enumerate(entropies):
            policy = {} if entropy is None else {"entropy": entropy}
            found.append(inspected(watch, step, **policy).metrics["hacking/alarm"])
        return found

    assert alarms([1.0, 1.5, 1.5, 1.5], [None, 1.0, 0.5, 0.3]) == [0, 0, 0, 1]
    assert alarms([1.0, 1.0, 1.5], [1.0, 0.1, 0.1]) == [0, 0, 1]


def cider_of(corpus):
    tokens = [[caption.split() for caption in captions] for captions in corpus]
    return build("cider", df=DocumentFrequencies.from_references(tokens, eos=True))


CIDER = mixed("cider")
COUNTED = [cider_of(corpus) for corpus in (CORPUS, CORPUS, [*CORPUS, ["a red dog"]])]
JUDGES = [build(name) for name in ("rouge_l", "rouge_l", "bleu")]
COMPARED = {
    # half the weight would silence the alarm
    "weights": [(mixed("cider", weight), {}) for weight in (1.0, 1.0, 0.5)],
    "frequencies": [(MixedReward({"cider": (cider, 1.0)}), {}) for cider in COUNTED],
    "judges": [(CIDER, {"mine": judge}) for judge in JUDGES],
    "validation": [(CIDER, {}, split) for split in ("val", "val", "test")],
}


@pytest.mark.parametrize("runs", COMPARED.values(), ids=list(COMPARED))
def test_rewards_and_judges_with_other_numbers_are_not_compared(runs):
    notes = {}
    for step, (reward, judges, *split) in enumerate(runs):
        watch = monitor(reward, judges, validation="".join(split), notes=notes)
        assert bool(inspected(watch, step).messages) == (step == 2)
    assert notes["hacking"]["start"]["step"] == 2


def test_what_a_validation_logs_is_worked_by_hand():
    terms = {"x": (Told("x", [1.0, 2.0]), 2.0), "y": (Told("y", [0.5, 0.0]), -1.0)}
    watch = monitor(MixedReward(terms), {"j": Told("j", [0.12345678, 0.5])})
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


def test_the_first_alarm_is_kept_and_every_alarm_stops():
    """The judge rises at step 1 and falls from that best validation at 2; the alarm goes on at 3."""
    rising = Told("x", *([step] * 2 for step in range(4)))
    reward = MixedReward({"x": (rising, 1.0)})
    judge = Told("j", *([score] * 2 for score in (0.5, 0.9, 0.6, 0.6)))
    limits = Thresholds(judge_errors=0.0, slip_errors=0.0, duplicates=1.0)
    watch = monitor(reward, {"j": judge}, thresholds=limits, stop=True)
    found = [inspected(watch, step) for step in range(4)]
    said = [
        (one.metrics["hacking/alarm"], one.stop is not None, len(one.messages))
        for one in found
    ]
    assert said == [(0, False, 0), (0, False, 0), (1, True, 1), (1, True, 0)]
    # also after a comparison that starts anew
    inspected(monitor(mixed("rouge_l"), notes=watch.notes), 4)
    assert watch.notes["hacking"]["first_alarm"]["step"] == 2


def test_a_warning_comes_again_only_with_other_signs():
    watch = monitor(mixed("repetition", -1.0))
    captions = ["a red circle", *["circle circle circle"] * 2, *["of of of"] * 2]
    said = [
        len(inspected(watch, step, [text, f"a blue {text}"]).messages)
        for step, text in enumerate(captions)
    ]
    assert said == [0, 1, 0, 1, 0]
