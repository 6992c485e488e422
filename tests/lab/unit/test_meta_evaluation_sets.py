"""Sets of human judgements: files of the published formats, counts, and the real sets where they
are.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewards.base import RewardError
from rewards.videos import video_frames
from rl_caption.data.base import DataError
from rl_caption.lab.meta_evaluation.config import JudgeSetConfig
from rl_caption.lab.meta_evaluation.figures import order_figures
from rl_caption.lab.meta_evaluation.program import compare_with_people
from rl_caption.lab.meta_evaluation.sets import SETS, load
from rl_caption.lab.meta_evaluation.sets.pairs import Region
from rl_caption.runtime.errors import ConfigError
from tests.clip_for_tests import noise_image
from tests.judgement_sets_for_tests import BUILDERS

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "judged_sets.json").read_text()
)


def read(name: str, folder: Path, **kwargs: Any) -> Any:
    """The first part of a set, or the only one."""
    part, *_ = load(name, folder, partial=True, kwargs=kwargs)
    return part


def printed(folder: Path, name: str) -> dict[str, Any]:
    """Rows and tables of a tiny set, as JSON has them."""
    BUILDERS[name](folder)
    photos = folder / "photos"
    photos.mkdir()
    rows = []
    for part in load(name, folder, photos, partial=True):
        about = part._replace(rows=[row._replace(image=None) for row in part.rows])
        images = [str(row.image) for row in part.rows]
        rows.append([about, images])
    has_references = rows[0][0].references
    settings = JudgeSetConfig(
        set=name,
        data=str(folder),
        metrics="bleu1,rouge,cider,length" if has_references else "length",
        partial=True,
        bootstrap=20,
        out=str(folder / "out"),
    )
    table = compare_with_people(settings).replace(str(folder), "")
    text = json.dumps(rows).replace(str(folder), "")
    return {"rows": json.loads(text), "table": table.splitlines()}


@pytest.mark.parametrize(
    "texts", [["a dog", "a dog", "b", "c", "d"], ["a dog", "b", "c", "d"]]
)
def test_json_of_flickr8k(tmp_path: Path, texts: list[str]) -> None:
    judgements = [
        {"caption": "a  cat", "rating": 2.0},
        {"caption": "a dog", "rating": 4.0},
        {"caption": "a bus", "rating": float("nan")},
    ]
    image = {
        "image_path": "d/1_a.jpg",
        "ground_truth": texts,
        "human_judgement": judgements,
    }
    for name in ("flickr8k.json", "crowdflower_flickr8k.json"):
        (tmp_path / name).write_text(json.dumps({"1_a": image}))
    expert = read("flickr8k_expert", tmp_path)
    assert (expert.captions, expert.image_ids) == (["a cat"], ["1_a.jpg"])
    # Of five references one was judged; of four the maker of the file took it out.
    crowd = read("flickr8k_crowdflower", tmp_path)
    assert crowd.references == [["a dog", "b", "c", "d"]] * 2


@pytest.mark.parametrize("name", BUILDERS)
def test_rows_and_tables_of_every_set(tmp_path: Path, name: str) -> None:
    assert printed(tmp_path, name) == GOLDEN["sets"][name]


def test_images_beside_the_files_of_a_set(tmp_path: Path) -> None:
    for name, folder, last in (
        ("flickr8k_expert", "Flickr8k_Dataset", "2_b.jpg"),
        ("composite", "val2014", "COCO_val2014_000000000012.jpg"),
        ("pascal50s", "JPEGImages", "2008_3.jpg"),
        ("foil", "val2014", "COCO_val2014_000000000008.jpg"),
    ):
        BUILDERS[name](tmp_path)
        (tmp_path / folder).mkdir(exist_ok=True)
        assert read(name, tmp_path).images[-1] == tmp_path / folder / last


def test_foil_of_images_that_nothing_was_tuned_on(tmp_path: Path) -> None:
    BUILDERS["foil"](tmp_path)
    with pytest.raises(DataError, match=r"dataset_coco\.json"):
        read("foil", tmp_path, held_out=True)
    images = [
        {"split": split, "filename": name, "imgid": name, "sentences": []}
        for split, name in (
            ("restval", "COCO_val2014_000000000007.jpg"),
            ("val", "COCO_val2014_000000000008.jpg"),
        )
    ]
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": images}))
    kept = read("foil", tmp_path, held_out=True)
    assert (kept.captions[0], sum(kept.excluded.values())) == ("a bus stops", 2)
    (tmp_path / "captions_val2014.json").unlink()
    assert not read("foil", tmp_path).references


def test_regions_of_aro(tmp_path: Path) -> None:
    BUILDERS["aro"](tmp_path)
    (tmp_path / "images").mkdir()
    noise_image(0).save(tmp_path / "images" / "5.jpg")
    assert read("aro", tmp_path, by_relation=True).shown_kinds
    region = read("aro", tmp_path).images[0]
    assert (region.box, region.render().size) == ((1, 2, 11, 10), (10, 8))
    with pytest.raises(RewardError, match=r"none\.jpg'"):
        Region(tmp_path / "none.jpg", (0, 0, 1, 1)).render()


def test_sugarcrepe_pp(tmp_path: Path) -> None:
    BUILDERS["sugarcrepe_pp"](tmp_path)
    found = read("sugarcrepe_pp", tmp_path)
    near = [0.9, 0.8, 0.7]
    far = [0.8, 0.7, 0.8]  # the second caption is as near to the negative
    scores = {"": np.array([[2.0, 3, 1], [2, 1, 1]] * 5)}
    figures = order_figures(found, scores, np.array([near, far] * 5))
    values = {figure.name: (figure.value, figure.count) for figure in figures}
    assert list(values)[::5] == [
        "ITT, swap_obj",
        "ITT, mean of kinds",
        "TOT, replace_rel",
    ]
    assert (values["ITT, swap_att"], values["TOT, mean of kinds"]) == (
        (0.5, 2),
        (0.5, 10),
    )
    assert "50.0 % of groups have equal scores, which count as wrong" in figures[0].note


def test_aro_order(tmp_path: Path) -> None:
    BUILDERS["aro_order"](tmp_path)
    (tmp_path / "val2014").mkdir()
    coco, flickr = load("aro_order", tmp_path, partial=True)
    assert not flickr.images
    assert coco.images[1] == tmp_path / "val2014" / "COCO_val2014_000000000007.jpg"
    true, *shuffled = coco.captions[:5]
    assert true == "a brown dog, with a red ball, runs on the green grass"
    words = sorted(true.replace(",", "").split())
    assert [sorted(text.replace(",", "").split()) for text in shuffled] == [words] * 4
    assert true not in shuffled
    assert coco.captions[5:] == ["dogs"] * 5
    assert (
        coco.captions
        == read("aro_order", tmp_path).captions
        != read("aro_order", tmp_path, seed=1).captions
    )
    (figure,) = order_figures(
        coco, {"": np.array([[2.0, 1, 1, 1, 3], [1, 1, 1, 1, 1]])}
    )
    assert (figure.name, figure.value) == ("precision at 1", 0.5), (
        "one shuffle scores higher; equal scores are right"
    )


@pytest.mark.parametrize("core", [b"numpy._core", b"numpy.core"])
def test_vatex_eval(tmp_path: Path, core: bytes) -> None:
    """Of the release of EMScore (ShiYaya/emscore, 426e424); NumPy 1 wrote another name of its
    module.
    """
    BUILDERS["vatex_eval"](tmp_path)
    for file in tmp_path.glob("*.pkl"):
        file.write_bytes(
            file.read_bytes().replace(b"numpy._core", core).replace(b"numpy.core", core)
        )
    (tmp_path / "videos" / "bbb_000002_000012").mkdir(parents=True)
    found: Any = load(
        "vatex_eval", tmp_path, partial=True, kwargs={"references": 1, "num_frames": 3}
    )
    first, second, third = [row.image for row in found[1].rows]
    assert first is second
    assert first == video_frames(tmp_path / "videos" / "aaa_000001_000011.mp4", 3)
    assert third == video_frames(tmp_path / "videos" / "bbb_000002_000012", 3)
    with pytest.raises(DataError, match="references is 3: expected 1 to 2"):
        read("vatex_eval", tmp_path, references=3)


def test_nothing_in_a_pickled_file_is_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BUILDERS["vatex_eval"](tmp_path)
    (tmp_path / "gts_list.pkl").write_bytes(b"cbuiltins\nprint\n(S'executed'\ntR.")
    with pytest.raises(DataError, match=r"gts_list\.pkl.*builtins\.print"):
        load("vatex_eval", tmp_path, partial=True)
    assert capsys.readouterr().out == ""


def test_activitynet_foil(tmp_path: Path) -> None:
    """Of the release of EMScore (ShiYaya/emscore, 426e424): segments, and references that overlap
    by over 0.4.
    """
    BUILDERS["activitynet_foil"](tmp_path)
    (tmp_path / "videos").mkdir()
    found = read("activitynet_foil", tmp_path)
    # Seconds 0 to 10 have all of 0 to 4, and 8 of the 28 of 3 to 30; 15 to 40 have 16 of those 28.
    assert found.references == [["A runner."], ["A long run."]]
    video = tmp_path / "videos" / "v_1.mp4"
    assert found.images == [
        video_frames(video, 10, (0.0, 10.4 / 40)),
        video_frames(video, 10, (15 / 40, 1.0)),
    ]
    # One sentence is right and the other wrong: of the paragraph, the sum counts.
    (figure,) = order_figures(found, {"": np.array([[0.9, 0.2], [0.4, 0.5]])})
    assert (figure.value, figure.count) == (1.0, 1)


def lines(folder: Path, *rows: Any) -> Path:
    path = folder / "ratings.jsonl"
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows),
        encoding="utf-8",
    )
    return path


LINE = {"image": "a.jpg", "caption": "A dog.", "rating": 3}


def test_any_file_of_ratings(tmp_path: Path) -> None:
    path = lines(tmp_path, LINE, "", {**LINE, "rating": 4.5, "group": 7, "system": "x"})
    found = read("ratings", path)
    assert (found.captions, found.ratings, found.image_ids) == (
        ["A dog."] * 2,
        [3.0, 4.5],
        ["a.jpg", "7"],
    )
    assert (found.within_images, found.published, found.images) == (True, (), [])
    assert not found.references
    (tmp_path / "a.jpg").write_bytes(b"x")
    odd = {
        **LINE,
        "caption": "A dog.\u2028It\u0085runs.",
        "references": ["a dog", "dogs"],
    }
    lines(tmp_path, json.dumps(odd, ensure_ascii=False))
    found = read("ratings", tmp_path)
    assert (found.references, found.images) == (
        [["a dog", "dogs"]],
        [tmp_path / "a.jpg"],
    )
    assert found.captions == [odd["caption"]], "only line feeds end a line"


def test_wrong_lines_of_ratings_are_named(tmp_path: Path) -> None:
    for row, message in (
        ({**LINE, "rating": "x"}, "line 2: .*'x'"),
        ({"image": "a.jpg", "rating": 1}, "line 2: 'caption'"),
        ({**LINE, "references": "a dog"}, "line 2: .*'a dog'"),
        ({**LINE, "references": ["a dog"]}, "references"),
        ("[1]", "line 2: "),
    ):
        with pytest.raises(DataError, match=message):
            read("ratings", lines(tmp_path, LINE, row))
    with pytest.raises(DataError, match="no ratings"):
        read("ratings", lines(tmp_path, ""))


@pytest.mark.parametrize("name", [name for name in SETS if name != "scenes"])
def test_missing_files_and_another_number_than_the_published_one_are_refused(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(DataError, match=r"needs|no ratings|jsonl"):
        load(name, tmp_path)
    if name not in ("ratings",):
        BUILDERS[name](tmp_path)
        with pytest.raises(DataError, match=rf"{name}.* has \d+ "):
            load(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "message"),
    [
        ("flickr8k_expert", "ExpertAnnotations.txt", "\t4\t4\t4", "\t4\t4", "float"),
        ("flickr8k_expert", "ExpertAnnotations.txt", "2_b.jpg#1", "2_b.jpg#9", "'2_b.jpg#9'"),
        ("composite", "8k_correctness.csv", "Input.image_url", "url", "'Input.image_url'"),
        ("pascal50s", "pair_pascal.mat", None, "text", "pair_pascal"),
        ("foil", "foilv1.0_test_2017.json", '"foil": true', '"foil": "no"', "'no'"),
        ("foil", "captions_val2014.json", None, '{"annotations": [{"image_id": 8, "caption": "a"}]}', r"captions_val2014\.json.*000000000007\.jpg'"),
        ("ratings", "mine.jsonl", '"rating": 2', '"rating": 2,,', r"line 2.*JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    tmp_path: Path, name: str, file: str, old: str | None, new: str, message: str
) -> None:
    """``old`` is replaced by ``new``, or all of the file."""
    BUILDERS[name](tmp_path)
    path = tmp_path / file
    if old is not None:
        assert old in path.read_text()
    path.write_text(new if old is None else path.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=message) as raised:
        load(name, tmp_path, partial=True)
    assert file in str(raised.value)


def test_unknown_names_and_arguments(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'flickr'"):
        load("flickr", tmp_path)
    with pytest.raises(ConfigError, match=r"set_kwargs\.side is.*composite"):
        load("composite", tmp_path, kwargs={"side": 1})


def test_the_real_files_have_the_published_counts(shared_data: Path) -> None:
    counts = {}
    for name, folder in (
        ("abstract50s", "abstract48s"),
        ("foil", "foil"),
        ("sugarcrepe", "sugarcrepe"),
    ):
        (part,) = load(name, shared_data / folder)
        counts[name] = len(part.image_ids)
    assert counts == {"abstract50s": 400, "foil": 943, "sugarcrepe": 7_511}
