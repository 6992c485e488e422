"""Sets of human judgements: files of the published formats, counts, and the real sets
where they are.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from rewards.videos import video_frames
from rl_caption.data.base import DataError
from rl_caption.lab.config import JudgeSetConfig
from rl_caption.lab.meta_evaluation.figures import order_figures
from rl_caption.lab.meta_evaluation.program import compare_with_people
from rl_caption.lab.meta_evaluation.sets import SETS, load
from tests.clip_for_tests import noise_image
from tests.judgement_sets_for_tests import BUILDERS

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "judged_sets.json").read_text()
)


def read(name, folder, **kwargs):
    """The first part of a set, or the only one."""
    part, *_ = load(name, folder, partial=True, kwargs=kwargs)
    return part


def printed(folder, name):
    """Rows and tables of a tiny set, as JSON has them."""
    BUILDERS[name](folder)
    photos = folder / "photos"
    photos.mkdir()
    parts = load(name, folder, photos, partial=True)
    rows = []
    for part in parts:
        about = part._replace(rows=[row._replace(image=None) for row in part.rows])
        rows.append([about, [str(row.image) for row in part.rows]])
    settings = JudgeSetConfig(
        set=name,
        data=str(folder),
        metrics="bleu1,rouge,cider,length" if parts[0].references else "length",
        partial=True,
        bootstrap=20,
        out=str(folder / "out"),
    )
    table = compare_with_people(settings)
    made = json.dumps({"rows": rows, "table": table.splitlines()})
    return json.loads(made.replace(str(folder), ""))


def test_json_of_flickr8k(tmp_path):
    """Of five references one was judged; of four the maker of the file took it out."""
    judgements = [
        {"caption": "a  cat", "rating": 2.0},
        {"caption": "a dog", "rating": 4.0},
        {"caption": "a bus", "rating": float("nan")},
    ]
    others = ["a dog", "b", "c", "d"]
    content = {}
    for name, texts in (("five", ["a dog", *others]), ("four", others)):
        content[name] = {
            "image_path": f"d/{name}.jpg",
            "ground_truth": texts,
            "human_judgement": judgements,
        }
    for name in ("flickr8k.json", "crowdflower_flickr8k.json"):
        (tmp_path / name).write_text(json.dumps(content))
    expert = read("flickr8k_expert", tmp_path)
    assert expert.captions == ["a cat", "a cat"]
    assert expert.image_ids == ["five.jpg", "four.jpg"]
    assert read("flickr8k_crowdflower", tmp_path).references == [others] * 4


@pytest.mark.parametrize("name", BUILDERS)
def test_rows_and_tables_of_every_set(tmp_path, name):
    assert printed(tmp_path, name) == GOLDEN["sets"][name]


def test_foil_of_images_that_nothing_was_tuned_on(tmp_path):
    BUILDERS["foil"](tmp_path)
    with pytest.raises(DataError, match=r"dataset_coco\.json"):
        read("foil", tmp_path, held_out=True)
    images = []
    for split, number in (("restval", 7), ("val", 8)):
        name = f"COCO_val2014_{number:012}.jpg"
        image = {"split": split, "filename": name, "imgid": number, "sentences": []}
        images.append(image)
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": images}))
    kept = read("foil", tmp_path, held_out=True)
    assert (kept.captions[0], sum(kept.excluded.values())) == ("a bus stops", 2)


def test_regions_of_aro(tmp_path):
    BUILDERS["aro"](tmp_path)
    (tmp_path / "images").mkdir()
    noise_image(0).save(tmp_path / "images" / "5.jpg")
    region = read("aro", tmp_path, by_relation=True).images[0]
    assert (region.box, region.render().size) == ((1, 2, 11, 10), (10, 8))


def test_sugarcrepe_pp(tmp_path):
    BUILDERS["sugarcrepe_pp"](tmp_path)
    found = read("sugarcrepe_pp", tmp_path)
    near = [0.9, 0.8, 0.7]
    far = [0.8, 0.7, 0.8]  # the second caption is as near to the negative
    scores = {"": np.array([[2.0, 3, 1], [2, 1, 1]] * 5)}
    figures = order_figures(
        found,
        scores,
        np.array([near, far] * 5),
    )
    values = {figure.name: (figure.value, figure.count) for figure in figures}
    assert values["ITT, swap_att"] == (0.5, 2)
    assert values["TOT, mean of kinds"] == (0.5, 10)
    assert "50.0 % of groups have equal scores, which count as wrong" in figures[0].note


@pytest.mark.parametrize("core", [b"numpy._core", b"numpy.core"])
def test_vatex_eval(tmp_path, core):
    """Of the release of EMScore (ShiYaya/emscore, 426e424); NumPy 1 wrote another name
    of its module.
    """
    BUILDERS["vatex_eval"](tmp_path)
    for file in tmp_path.glob("*.pkl"):
        file.write_bytes(
            file.read_bytes().replace(b"numpy._core", core).replace(b"numpy.core", core)
        )
    (tmp_path / "videos" / "bbb_000002_000012").mkdir(parents=True)
    found = load(
        "vatex_eval", tmp_path, partial=True, kwargs={"references": 1, "num_frames": 3}
    )
    first, second, third = [row.image for row in found[1].rows]
    assert first is second
    assert first == video_frames(tmp_path / "videos" / "aaa_000001_000011.mp4", 3)
    assert third == video_frames(tmp_path / "videos" / "bbb_000002_000012", 3)


def test_nothing_in_a_pickled_file_is_executed(tmp_path, capsys):
    BUILDERS["vatex_eval"](tmp_path)
    (tmp_path / "gts_list.pkl").write_bytes(b"cbuiltins\nprint\n(S'executed'\ntR.")
    with pytest.raises(DataError, match=r"gts_list\.pkl.*builtins\.print"):
        load("vatex_eval", tmp_path, partial=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", [name for name in SETS if name != "scenes"])
def test_missing_files_and_another_number_than_the_published_one_are_refused(
    tmp_path, name
):
    with pytest.raises(DataError, match=r"needs|no ratings|jsonl"):
        load(name, tmp_path)
    if name != "ratings":
        BUILDERS[name](tmp_path)
        with pytest.raises(DataError, match=rf"{name}.* has \d+ "):
            load(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "message"),
    [
        ("flickr8k_expert", "ExpertAnnotations.txt", "\t4\t4\t4", "\t4\t4", "float"),
        ("pascal50s", "pair_pascal.mat", None, "text", "pair_pascal"),
        ("foil", "captions_val2014.json", None, '{"annotations": [{"image_id": 8, "caption": "a"}]}', r"captions_val2014\.json.*000000000007\.jpg'"),
        ("ratings", "mine.jsonl", '"rating": 2', '"rating": 2,,', r"line 2.*JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, name, file, old, new, message):
    """``old`` is replaced by ``new``, or all of the file."""
    BUILDERS[name](tmp_path)
    path = tmp_path / file
    if old is not None:
        assert old in path.read_text()
    path.write_text(new if old is None else path.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=message) as raised:
        load(name, tmp_path, partial=True)
    assert file in str(raised.value)


def test_the_real_files_have_the_published_counts(shared_data):
    counts = {}
    for folder in ("abstract48s", "foil", "sugarcrepe"):
        (part,) = load(folder.replace("48", "50"), shared_data / folder)
        counts[folder] = len(part.image_ids)
    assert counts == {"abstract48s": 400, "foil": 943, "sugarcrepe": 7_511}
