"""The programs of ``benchmarks/studies``: what they compute, by hand, and each of them run on tiny data."""

import argparse
import json
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from benchmarks.harness import Timing
from benchmarks.scst_step import Shapes
from benchmarks.studies import (
    concreteness_captions,
    curation,
    growth,
    relations,
    similarity_regulator,
    specificity_study,
)
from benchmarks.studies.noisy_judges import FORMS, build_played
from benchmarks.studies.relations import CaptionLikelihood, RelationScenes, replaced_relations
from benchmarks.studies.similarity_regulator import (
    Figures,
    Photos,
    agreement,
    captioner_figures,
    difference,
)
from benchmarks.studies.specificity_study import (
    RatedCaption,
    SpecificityStudy,
    data_section,
    hubness,
    load_models,
    rated_captions,
    reference_metrics,
    tau_by_length,
)
from benchmarks.studies.stress_reference import known_reward
from benchmarks.studies.text_similarity import TextSimilarity
from rewards.base import RewardError
from rewards.clip.backbone import FrozenEncoder, load_frozen_encoder
from rewards.text.concreteness import CaptionLength
from rl_caption.cli.configuration import parse
from rl_caption.cli.programs import PROGRAMS
from rl_caption.data.base import DataError, Row, reward_inputs
from rl_caption.data.scenes import ScenesData, claims, oracle
from rl_caption.evaluation.metrics import evaluate_captions
from rl_caption.lab.meta_evaluation.figures import rated_figures
from rl_caption.lab.meta_evaluation.sets import RatedCaptions, load
from rl_caption.lab.meta_evaluation.specificity import make_chains
from rl_caption.runtime.errors import ConfigError
from tests.captioners_for_tests import SHAPE, tiny_captioner, tiny_rows
from tests.clip_for_tests import tiny_student
from tests.judgement_sets_for_tests import BUILDERS

SCENES = {"num_train": 0, "num_val": 0, "num_test": 12, "num_unseen": 0, "image_size": 32}
ROWS: list[Row] = list(ScenesData(**SCENES).split("test"))
RECALLS = {f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)}


class OfImages:
    """A metric that looks at images."""

    __name__, columns, bounds, signature = (
        "of_images",
        frozenset({"image"}),
        (-1.0, 1.0),
        "of_images",
    )

    def __call__(self, prompts: object, completions: list[str], **columns: Any) -> list[float]:
        raise NotImplementedError


def test_options_of_studies_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--models tiny=.*nowhere"):
        load_models([f"tiny={tmp_path / 'nowhere'}"], "cpu")
    with pytest.raises(ConfigError, match="metric 'of_images'"):
        reference_metrics([f"{__name__}:OfImages"])
    (tmp_path / "config.yaml").write_text("rollout: {num_samples: 2}")
    with pytest.raises(ConfigError, match="'data'"):
        data_section(tmp_path / "config.yaml")


def test_captions_of_growing_length_are_rated_a_single_time_by_the_oracle() -> None:
    chains = make_chains([row["long_reference"] for row in ROWS])[:4]
    found = rated_captions(ROWS[:4], chains)
    assert len({(caption.row, caption.text) for caption in found}) == len(found)
    own = {caption.text for caption in found if caption.row == 0}
    assert chains[0] is not None
    assert own > {*chains[0].captions, *chains[0].negatives}
    assert all(
        caption.f1 == oracle(caption.text, ROWS[caption.row]["scene"]).f1 for caption in found[::7]
    )


def test_tau_by_length_by_hand() -> None:
    # Two bins. In the first, pairs 01 C, 02 D, 12 D; scene 0 has 01, scene 1 has one caption. The second is empty.
    sizes = ((0, 3, 0.1), (0, 9, 0.2), (1, 4, 0.3), (1, 30, 0.4))
    captions = [RatedCaption(row, "word " * words, f1) for row, words, f1 in sizes]
    first, second, third, total = tau_by_length([2, 3, 1, 4], captions, (0, 10, 30))
    assert (first.low, first.high, first.captions) == (0, 9, 3)
    assert first.tau_b == pytest.approx(-1 / 3)
    assert (first.within_scene_tau_b, first.scenes) == (1, 1)
    assert (second.captions, second.tau_b, second.within_scene_tau_b) == (0, None, None)
    assert (third.low, third.high, third.captions, third.tau_b) == (30, None, 1, None)
    # All pairs: 01 C, 02 D, 03 C, 12 D, 13 C, 23 C.
    assert (total.captions, total.tau_b) == (4, pytest.approx(2 / 6))
    assert tau_by_length([1, 1, 1, 1], captions, (0,))[0].tau_b is None


def test_hubness_by_hand() -> None:
    # Candidate 0 is nearest to every query, candidate 1 to none, candidate 2 second to all.
    queries = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.1, 0.5], [2.0, 0.0, 0.4]])
    candidates = torch.tensor([[3.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.2, 0.0, 1.0]])
    # Occurrences 3, 0, 0: mean 1, deviations 2 -1 -1, third moment 6/3, variance 6/3.
    assert hubness(queries, candidates, 1) == pytest.approx((2 / 2**1.5, 2 / 3, 1))
    assert hubness(torch.eye(3), torch.eye(3), 1) == (0, 0, pytest.approx(1 / 3))
    assert hubness(queries, candidates, 2, chunk_size=1) == hubness(queries, candidates, 2)


def test_a_metric_of_length_has_every_step_up_and_no_negative_below() -> None:
    study = SpecificityStudy(ROWS)
    study.add_metric("words", CaptionLength())
    rates = study.metrics["words"]["rates"]
    assert (rates.positive, rates.negative, study.metrics["words"]["released"]) == (1, 0, None)
    with pytest.raises(DataError, match="long_reference"):
        SpecificityStudy([{**ROWS[0], "long_reference": None}])  # type: ignore[typeddict-item]


def test_the_study_of_specificity(tmp_path, monkeypatch, capsys):
    config, out = tmp_path / "config.yaml", tmp_path / "out"
    config.write_text(
        yaml.safe_dump(
            {"data": {"format": "scenes", "kwargs": SCENES}, "rollout": {"num_samples": 2}}
        )
    )
    tiny_student(tmp_path / "run/export/best")
    models = [f"run={tmp_path / 'run'}", f"as is={tmp_path / 'run/export/best'}"]
    monkeypatch.setattr(FrozenEncoder, "too_long", lambda self, texts: 7)
    words = ["study", "--data", config, "--out", out, "--device", "cpu", "--models", *models]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    specificity_study.main()
    printed = capsys.readouterr().out
    assert (out / "specificity.md").read_text() in printed
    content = json.loads((out / "specificity.json").read_text())
    assert list(content["metrics"]) == [
        "words",
        "cider",
        "rouge_l",
        "specs of run",
        "specs of as is",
    ]
    rates = content["metrics"]["specs of run"]["rates"]
    assert rates == content["metrics"]["specs of as is"]["rates"], (
        "a run stands for its best export"
    )
    assert rates["steps"] == content["metrics"]["words"]["rates"]["steps"]
    assert content["models"]["run"]["truncated"] == 7, "by the model's own tokenizer"
    assert content["models"]["run"]["long"].keys() == RECALLS
    for name in ("SR_neg, %", "10 to 19", "image to text R@1, %", "never near, %"):
        assert name in printed


def test_agreement_of_students_is_that_of_the_judge_and_differences_are_means_over_seeds() -> None:
    captions, ratings = ["a", "bb", "ccc", "dd", "e", "ffff"], [1.0, 2.0, 4.0, 1.0, 2.0, 3.0]
    photos = ["1", "1", "1", "2", "2", "2"]
    part = RatedCaptions(
        "set", captions, ratings, photos, photos, [["a reference"]] * 6, "tau_c", ""
    )

    def length(prompts: Any, texts: Any, **columns: Any) -> list[float]:
        return [float(len(text)) for text in texts]

    metric: Any = length
    tau, resampled = agreement(part, metric, 1, 3)
    judged = rated_figures(part, length(None, captions))
    assert tau == pytest.approx(next(figure.value for figure in judged if figure.name == "tau_c"))
    assert len(resampled) == 3
    seeds = [Figures({"R@1": 0.2}, {"R@1": [0.2, 0.4]}), Figures({"R@1": 0.4}, {"R@1": [0.4, 0.6]})]
    none = [Figures({"R@1": 0.1}, {"R@1": [0.1, 0.1]})] * 2
    assert difference(seeds, "R@1", none, "R@1") == "+20.00 [+20.50, +39.50]"
    assert difference(seeds[:1], "R@1", none, "R@1") == "+10.00 [+10.50, +29.50]", (
        "one seed in common"
    )


def test_figures_of_captions_are_means_over_photos_and_their_resamples(tmp_path: Path) -> None:
    captions = {"2": "a dog runs", "1": "a cat", "3": "a dog runs"}
    predictions = [
        {"image_id": image_id, "caption": caption} for image_id, caption in captions.items()
    ]
    (tmp_path / "predictions.json").write_text(json.dumps(predictions))
    rows: Any = {
        image_id: {
            "image_id": image_id,
            "image": f"{image_id}.jpg",
            "references": [f"a dog runs {image_id}"],
        }
        for image_id in ("0", "1", "2", "3")
    }

    def words_by_photo(prompts: Any, texts: list[str], **columns: Any) -> list[float]:
        assert columns["image"] == ["2.jpg", "1.jpg", "3.jpg"]
        return [float(len(text.split())) for text in texts]

    scores: Any = {"judge": words_by_photo}
    figures = captioner_figures(tmp_path, rows, scores, 50)
    references = {image_id: rows[image_id]["references"] for image_id in captions}
    assert figures.values["CIDEr"] == pytest.approx(
        evaluate_captions(captions, references, metrics=["cider"]).metrics["CIDEr"]
    )
    assert figures.values["judge"] == pytest.approx(8 / 3)
    assert (figures.values["words"], figures.values["vocabulary"]) == (pytest.approx(8 / 3), 4)
    assert {round(3 * value) for value in figures.resamples["judge"]} == {6, 7, 8, 9}, (
        "draws of 3 photos"
    )


def test_captioners_under_students_are_trained_and_evaluated_by_commands_that_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: dict[str, list[Any]] = {"scst": [], "evaluate": []}

    def run_module(package: str, program: str, *words: str) -> None:
        assert package == "rl_caption"
        configs[program].append(parse(resolve_name(str(PROGRAMS[program].config)), words, program))

    monkeypatch.setattr(similarity_regulator, "run_module", run_module)
    arguments = argparse.Namespace(
        data="data", test_data="few", features="lite0.h5", captioner="xe", out=tmp_path
    )
    vars(arguments).update(texts=["frozen"], weights=["0", "10/3"], seeds=[1])
    similarity_regulator.train_captioners(arguments, ["--train.max_steps=30"])
    assert [config.train.objective for config in configs["scst"]] == ["reinforce", "dico"] * 2
    for number, config in enumerate(configs["scst"]):
        student = similarity_regulator.folder_of(
            tmp_path, "frozen", arguments.weights[number // 2], 1
        )
        assert config.reward.terms["ref_l_clipscore"].kwargs["backbone"] == f"{student}/export/last"
        assert (config.model.init, config.train.max_steps, config.train.seed) == ("xe", 30, 1)
        evaluation = configs["evaluate"][number]
        assert (evaluation.model, evaluation.data.path) == (f"{config.run.dir}/export/last", "few")


def test_growth_compares_every_size_with_the_smallest() -> None:
    tiny = {"captioner": {**SHAPE, "num_heads": 2}, "words": 40, "regions": 3, "region_dim": 6}
    shapes = Shapes(**tiny, images=2, samples=2, tokens=4)
    sizes = {"samples": (1, 3), "images": (1, 2), "length": (2, 4), "limit": (3, 4)}
    rows = list(growth.measure(Timing(repeats=1), shapes=shapes, sizes=sizes))
    found = [(row.name.rsplit(": ", 1)[1], row.baseline) for row in rows]
    assert found == [("3", "1"), ("2", "1"), ("4", "2"), ("4", "3")]
    assert all(row.ratio > 0 for row in rows)


def karpathy(path: Path, images: int) -> list[dict[str, Any]]:
    """Captions of dogs and cats in turn; the last two images are for validation and test."""
    entries = []
    for number in range(images):
        animal = ("dog", "cat")[number % 2]
        captions = [f"Number {number} is {text} {animal} ." for text in ("a", "one", "the")]
        sentences = [
            {"raw": caption, "tokens": caption.lower().split(), "sentid": 0} for caption in captions
        ]
        split = {images - 1: "test", images - 2: "val"}.get(number, "train")
        name = f"{number}.jpg"
        (path.parent / name).write_bytes(b"")
        entries.append({"filename": name, "split": split, "sentences": sentences, "imgid": number})
    path.write_text(json.dumps({"dataset": "tiny", "images": entries}))
    return entries


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_texts_of_concreteness_are_captions_sentences_and_titles(tmp_path, capsys):
    entries = karpathy(tmp_path / "dataset.json", 42)
    (tmp_path / "wise").write_text(
        "One does what one can. Two words.\n\t-- Somebody\n%\nNothing is ever lost.\n"
    )
    (tmp_path / "lines.txt").write_text("tools for everything else\ntoo short\n")
    out = tmp_path / "texts"
    arguments = [
        "--photos",
        str(tmp_path / "dataset.json"),
        "--out",
        str(out),
        "--titles",
        "7",
        "--count",
        "10",
    ]
    concreteness_captions.main(
        [*arguments, "--sentences", str(tmp_path / "wise"), str(tmp_path / "lines.txt")]
    )
    photos = (out / "photos.txt").read_text().splitlines()
    assert set(photos) == {one["raw"] for entry in entries[:-2] for one in entry["sentences"]}
    sentences = {"One does what one can.", "Nothing is ever lost.", "tools for everything else"}
    ratings = {line["caption"]: line["rating"] for line in read_lines(out / "ratings.jsonl")}
    assert {text for text, rating in ratings.items() if rating} <= set(photos)
    assert sum(ratings.values()) == 10
    titles = {text for text, rating in ratings.items() if not rating} - sentences
    assert sentences <= set(ratings)
    assert titles
    assert all("dog" in title.lower() or "cat" in title.lower() for title in titles), (
        "nouns that end captions"
    )
    assert set((out / "captions.txt").read_text().splitlines()) == set(ratings)
    assert set((out / "train.txt").read_text().splitlines()) == {*photos, *sentences, *titles}


@pytest.mark.parametrize("several", [False, True])
def test_a_third_of_the_pairs_of_curation_is_bad(tmp_path, several, capsys):
    karpathy(tmp_path / "dataset.json", 902)
    pairs, images = tmp_path / "made" / "pairs.jsonl", 500 if several else 900
    options = ["--all_captions", "--scorer_images", "400"] if several else []
    curation.main(["make", "--data", str(tmp_path / "dataset.json"), "--out", str(pairs), *options])
    train = [row for row in read_lines(pairs) if row["split"] == "train"]
    total = sum(len(row["references"]) for row in train)
    assert (len(train), total) == (images, images * 3 if several else images)
    for row in train:
        for text, kind in zip(row["references"], row["kinds"], strict=True):
            assert text.startswith(f"Number {row['image_id']} ") == (kind == "clean"), (row, text)
            assert text.startswith("Number ") == (kind != "abstract")
    half = [row for row in read_lines(pairs.parent / "random.jsonl") if row["split"] == "train"]
    assert sum(len(row["references"]) for row in half) == total // 2
    labels = read_lines(pairs.parent / "ratings.jsonl")
    assert sum(line["rating"] for line in labels) == 100
    assert all(line["caption"].startswith("Number ") == bool(line["rating"]) for line in labels)
    if several:
        kept_back = {
            row["image_id"]
            for row in read_lines(pairs.parent / "scorer.jsonl")
            if row["split"] == "train"
        }
        assert len(kept_back) == 400
        assert kept_back.isdisjoint(row["image_id"] for row in train)
    capsys.readouterr()
    curation.main(["count", "--pairs", str(pairs), str(pairs), str(pairs.parent / "random.jsonl")])
    first = next(line for line in capsys.readouterr().out.splitlines() if "pairs.jsonl" in line)
    assert [float(cell) for cell in first.split("|")[3:6]] == pytest.approx(
        [66.7, 16.7, 16.7], abs=0.07
    )


def test_the_text_tower_is_judged_by_the_other_captions_of_the_image(tmp_path: Path) -> None:
    BUILDERS["sugarcrepe"](tmp_path)
    annotations = [
        {"image_id": number, "id": 10 * number + index, "caption": text}
        for number in (1, 2)
        for index, text in enumerate(("A dog, swap_obj.", "one dog runs", "a dog in the park"))
    ]
    (tmp_path / "captions_val2017.json").write_text(json.dumps({"annotations": annotations}))
    (found,) = load("sugarcrepe", tmp_path, partial=True)
    kinds = list(found.kinds)
    (others,) = found.references.values()
    assert others[kinds.index("swap_obj")] == ["one dog runs", "a dog in the park"], (
        "the caption itself is left out"
    )
    score = TextSimilarity(str(tiny_student(tmp_path / "student")))
    one, two = ["one dog runs", "a cat"], [["one dog runs"], ["a cat", "one dog runs"]]
    embedded = score.backbone.encode_texts(one).double()
    expected = [1.0, float(embedded[1] @ embedded.mean(dim=0))]
    assert score(None, one, references=two) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("least", [1, 4])
def test_references_of_relation_scenes_all_tell_a_true_relation(least: int) -> None:
    data = RelationScenes(num_train=20, num_val=5, min_references=least)
    rows = [*data.split("train"), *data.split("val")]
    assert len(rows) == 25
    for row in rows:
        assert len({text.lower().rstrip(".") for text in row["references"]}) >= least
        for text in row["references"]:
            found = [claim.true for claim in claims(text, row["scene"]) if claim.kind == "relation"]
            assert found, text
            assert all(found), text


def test_the_likelihood_of_a_caption_is_that_of_its_tokens_one_after_the_other(
    tmp_path: Path,
) -> None:
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, tmp_path)
    captions, rows = ["a dog runs", "a dog", "a red train near a station"], tiny_rows(3)
    score = CaptionLikelihood(str(tmp_path), max_tokens=12, batch_size=2)
    expected = []
    for caption, row in zip(captions, rows, strict=True):
        inputs, total = captioner.preprocess([row]), 0.0
        (ids,) = captioner.encode([caption], 12)
        for position, token in enumerate(ids):
            prefix = torch.tensor([[ids[: position + 1]]])
            logits = captioner.token_logits(captioner.policy, inputs, prefix)[0, 0, -1]
            total += logits.double().log_softmax(-1)[token].item()
        expected.append(total)
    images = [row["image"] for row in rows]
    assert score(None, captions, image=images) == pytest.approx(expected, abs=1e-5)
    assert score(None, ["a zebra", "two zebras run"], image=images[:2]) == [-1e6, -1e6]
    with pytest.raises(RewardError, match="4 tokens"):
        CaptionLikelihood(str(tmp_path), max_tokens=4)(
            None, ["a dog", "a red train near a station"], image=images[:2]
        )


def test_relations_are_replaced_by_false_ones_and_a_table_says_how_often_models_see_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = replaced_relations(list(RelationScenes(0, 30).split("val")))
    kinds = [kind for *_, kind in pairs]
    assert set(kinds) == {"left for right", "above for below", "another axis"}
    horizontal = {"left", "right"}
    for row, true, false, kind in pairs:
        assert [
            claim.true for claim in claims(false, row["scene"]) if claim.kind == "relation"
        ] == [False]
        sides = [bool(horizontal & set(text.split())) for text in (true, false)]
        expected = {"left for right": [True, True], "above for below": [False, False]}
        assert sides == expected[kind] if kind in expected else sides[0] != sides[1]
    captioner = tiny_captioner(max_positions=32)
    captioner.save_pretrained(captioner.policy, tmp_path / "captioner")
    dual = str(tiny_student(tmp_path / "dual"))
    relations.main(["--captioners", str(tmp_path / "captioner"), "--dual", dual, "--scenes", "30"])
    printed = capsys.readouterr().out.splitlines()[-4:]  # DeepSpeed, imported first here, may print
    header, _, likelihood, cosine = (
        [cell.strip() for cell in row.strip("|").split("|")] for row in printed
    )
    assert header[1] == f"left for right ({kinds.count('left for right')} pairs)"
    assert len(header) == len(likelihood) == len(cosine) == 6
    backbone = load_frozen_encoder(dual)
    images = backbone.encode_images([row["image"] for row, *_ in pairs])
    first, second = (
        (images * backbone.encode_texts([pair[n] for pair in pairs])).sum(-1) for n in (1, 2)
    )
    assert float(cosine[4]) == pytest.approx(100 * (first > second).float().mean().item(), abs=0.05)
    assert float(cosine[5]) == pytest.approx((first - second).abs().mean().item(), abs=6e-5)


def test_relations_that_captions_of_an_evaluation_state_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced = {
        what: (row, true, false)
        for row, true, false, what in replaced_relations(list(RelationScenes(0, 20).split("val")))
    }
    row, true, false = replaced["left for right"]
    other, above, _ = replaced["above for below"]
    captions = [
        (row["image_id"], f"{true} {false}"),
        (other["image_id"], above),
        ("test-000000", "a photo of things"),
    ]
    entries = [{"image_id": name, "caption": caption} for name, caption in captions]
    (tmp_path / "predictions.json").write_text(json.dumps(entries))
    relations.main(["--evaluations", str(tmp_path), "--scenes", "20"])
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"| {tmp_path} | 3 | 3 | 66.7 | 2 | 50.0 | 1 | 100.0 |"
    )


def test_similarities_of_matching_and_other_pairs_by_hand() -> None:
    photos = Photos.__new__(Photos)
    photos.owners = np.array([0, 1])
    photos.teacher = {"image": torch.eye(2), "text": torch.tensor([[0.6, 0.8], [0.0, 1.0]])}
    of = photos.similarities(torch.eye(2), torch.tensor([[1.0, 0.0], [0.6, 0.8]]))
    # Cosines [[1, .6], [0, .8]], the teacher's [[.6, 0], [.8, 1]].
    assert of == pytest.approx(
        {
            "positive mean": 0.9,
            "positive sd": 0.1,
            "shortfall": 0.1,
            "negative mean": 0.3,
            "negative sd": 0.3,
            "excess": 0.3,
        }
    )


def test_a_known_reward_is_a_mean_over_seeds() -> None:
    curves = ([0.2, 0.4, 0.6, 0.5, 0.4, 0.3, 0.3], [0.4, 0.4, 0.4, 0.5, 0.4, 0.3, 0.3])
    predictions = [
        {"best_of_n": curve, "probes": {"a": 1.0, "b": 0.5, "c": None}} for curve in curves
    ]
    runs = [
        {"step": [0, 24, 48, 60, 72, 84], "gold": [0.5, 0.6, 0.5, 0.4, 0.3, 0.0], "alarms": alarms}
        for alarms in ([60, 72], [84])
    ]
    line = known_reward(predictions, runs)
    assert (line["seeds"], line["runs"]) == (2, 2)
    assert line["probes"] == pytest.approx(0.75)
    assert line["change"] == pytest.approx(0)
    assert (line["peak"], line["fall"]) == (4, pytest.approx(0.2))
    assert line["push_change"] == pytest.approx(-0.1)
    assert line["push_alarm"] == 60, "84 is beyond the training that is compared"
    assert known_reward([], runs).keys() == {"seeds", "runs", "push_change", "push_alarm"}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_is_played_by_the_oracle_errs_as_often_as_it_is_told(form: str) -> None:
    rows = list(ScenesData(60, 0, 0, 0, questions=3).split("train"))
    prompts, columns = reward_inputs(rows)
    true = [row["long_reference"] for row in rows]
    false = true[1:] + true[:1]

    def mean(captions: list[str], **options: Any) -> float:
        scores = build_played(form, **options)(prompts, captions, **columns)
        assert scores == build_played(form, **options)(prompts, captions, **columns), (
            "a pure function"
        )
        return sum(scores) / len(scores)

    assert mean(true) > mean(false) + 0.5
    assert mean(true, error=0.4) < mean(true, error=0.1) < mean(true)
    assert mean(false, long_bias=True) > mean(false)
    assert mean(true, error=0.4, seed=1) != mean(true, error=0.4)
