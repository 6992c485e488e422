"""Data sets of the hub, Parquet files and published layouts, each made small here:
rows, splits, errors.
"""

import io
import json
import pickle
import tarfile

import pytest

from rewards.images import open_image
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError
from rl_caption.data.checks import check_data
from rl_caption.data.formats import build_data
from tests.clip_for_tests import noise_image


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
    )
    return path


def photo(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise_image(seed, (8, 8)).save(path)
    return path


def encoded(seed):
    buffer = io.BytesIO()
    noise_image(seed, (8, 8)).save(buffer, "PNG")
    return buffer.getvalue()


def rows_of(split="train", **config):
    return list(build_data(DataConfig(**config))[split])


# --- published layouts --------------------------------------------------------------------------


def nocaps(folder):
    images, annotations = [], []
    for number, domain in enumerate(("in-domain", "near-domain", "near-domain")):
        name = f"{number}.png"
        photo(folder / "validation" / name, number)
        images.append({"id": number, "file_name": name, "domain": domain})
    for number in range(6):
        caption = {
            "id": number,
            "image_id": number % 3,
            "caption": f"Caption {number} .",
        }
        annotations.append(caption)
    return {"licenses": [], "images": images, "annotations": annotations}


def test_nocaps_is_one_split_or_one_for_each_domain(tmp_path):
    path = write(tmp_path / "nocaps_val_4500_captions.json", nocaps(tmp_path))
    config = DataConfig(format="coco", path=str(path), image_root="validation")
    data = build_data(config)
    assert [*data] == ["val"]
    check_data(data, ["val"])
    row = data["val"][1]
    assert row["image_id"] == "1"
    assert row["image"] == str(tmp_path / "validation" / "1.png")
    assert row["references"] == ["Caption 1 .", "Caption 4 ."]
    config.kwargs = {"split_by": "domain"}
    domains = build_data(config)
    assert [*domains] == ["in-domain", "near-domain"]
    assert [row["image_id"] for row in domains["near-domain"]] == ["1", "2"]


TWICE = [{"id": 1, "file_name": "a"}, {"id": "1", "file_name": "b"}]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"annotations": [{"image_id": 7, "caption": "a"}]}, "'7'"),
        ({"images": TWICE}, "'1'"),
    ],
)
def test_wrong_annotations_are_named(tmp_path, change, part):
    path = write(tmp_path / "captions.json", nocaps(tmp_path) | change)
    with pytest.raises(DataError, match=rf"captions\.json.*{part}"):
        build_data(DataConfig(format="coco", path=str(path)))


def test_of_sharegpt4v_the_first_images_are_held_out_and_the_last_turn_is_the_caption(
    tmp_path,
):
    conversations = []
    for number in range(5):
        name = f"coco/train2017/{number}.png"
        photo(tmp_path / "data" / name, number)
        question = {"from": "human", "value": "<image>\nDescribe it."}
        text = f"A dog {number}.\n\nIt is on a red couch."
        turns = [question, {"from": "gpt", "value": text}]
        conversations.append({"id": "0", "image": name, "conversations": turns})
    path = write(tmp_path / "captions.json", conversations)
    config = {"format": "sharegpt4v", "path": str(path), "image_root": "data"}
    data = build_data(DataConfig(**config, kwargs={"val_images": 2}))
    assert (len(data["val"]), len(data["train"])) == (2, 3)
    check_data(data, [*data])
    row = data["train"][0]
    assert row["references"] == ["A dog 2.  It is on a red couch."]
    assert row["references"] == [row["long_reference"]]
    assert row["image_id"] == "coco/train2017/2.png"
    assert row["image"] == f"{tmp_path}/data/coco/train2017/2.png"


def test_summaries_of_sdci_are_references_and_images_without_are_left_out(tmp_path):
    folder = tmp_path / "densely_captioned_images"
    summaries = {
        "a": {"base": ["A cat.", "A cat sits."], "m-1": ["An ear."]},
        "b": {"base": "A dog."},
        "c": None,
    }
    for name, values in summaries.items():
        photo(folder / "photos" / f"sa_{name}.png", ord(name))
        content = {"image": f"sa_{name}.png", "mask_data": {}, "summaries": values}
        write(folder / "complete" / f"{name}.json", content)
    write(folder / "splits.json", {"train": ["a.json", "c.json"], "valid": ["b.json"]})
    data = build_data(DataConfig(format="dci", path=str(folder)))
    (cat,), (dog,) = data["train"], data["val"]
    assert cat["references"] == ["A cat.", "A cat sits."]
    assert dog["image_id"] == "b.json"
    assert dog["long_reference"] == "A dog."
    check_data(data, [*data])


def test_json_lines_of_other_layouts_are_read_by_columns(tmp_path):
    line = {"image/key": "aar_1", "IIW": "A red car.", "part": "test", "objects": [{}]}
    path = write(tmp_path / "data.jsonlines", json.dumps(line) + "\n")
    columns = {"image": "{image/key}.png", "references": "IIW", "split": "part"}
    config = {"format": "jsonl", "path": str(path), "image_root": "images"}
    (row,) = rows_of("test", columns=columns, **config)
    assert row["references"] == ["A red car."]
    assert row["image"] == str(tmp_path / "images" / "aar_1.png")
    for changed, part in (
        ({"references": "texts"}, r"data\.columns\.references"),
        ({"image": "{folder}/{file}"}, r"data\.columns\.image"),
        ({"references": "objects"}, "references"),
    ):
        with pytest.raises(DataError, match=part):
            build_data(DataConfig(**config, columns=columns | changed))


# --- the hub and Parquet ------------------------------------------------------------------------


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return library


def assert_image(row, number):
    image = open_image(row["image"])
    assert image.tobytes() == noise_image(number, (8, 8)).tobytes()


def test_images_may_be_paths_and_sentences_objects(tmp_path, datasets):
    columns = {
        "filepath": ["val2014"],
        "filename": ["1.png"],
        "sentences": [[{"raw": "A dog ."}, {"raw": "A cat ."}]],
    }
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict(columns).to_parquet(path)
    image = str(photo(tmp_path / "photos" / "val2014" / "1.png"))
    named = {"image": "{filepath}/{filename}", "references": "sentences"}
    config = {"format": "hub", "path": str(path), "columns": named}
    data = build_data(DataConfig(**config, image_root=str(tmp_path / "photos")))
    (row,) = data["train"]
    assert row["references"] == ["A dog .", "A cat ."]
    assert row["image"] == image
    check_data(data, [*data])
    table = write(tmp_path / "train.csv", f"image,caption\n{image},A dog\n")
    named = {"image": "image", "references": "caption"}
    (row,) = rows_of(format="hub", path=str(table), columns=named)
    assert row["image_id"] == image


def test_what_is_wrong_with_a_table_is_named(tmp_path, datasets):
    columns = {"image": [{"bytes": b"none", "path": None}], "text": ["A dog."]}
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict(columns).to_parquet(path)
    named = {"image": "image", "references": "text"}
    data = build_data(DataConfig(format="hub", path=str(path), columns=named))
    message = r"1 unreadable images: train .*rows\.parquet.*row 0"
    with pytest.raises(DataError, match=message):
        check_data(data, ["train"])
    with pytest.raises(DataError, match=r"data\.path"):
        rows_of(format="hub", path=str(tmp_path / "no"))


def tar(path, files, mode="w"):
    """A tar archive of files."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def sample(number, caption, **more):
    """The files of a sample of a shard."""
    files = {f"{number:03}.png": encoded(number)}
    if caption is not None:
        files[f"{number:03}.txt"] = f"{caption}\n".encode()
    return files | ({f"{number:03}.json": json.dumps(more).encode()} if more else {})


COLUMNS = {"image": "png", "references": "txt", "image_id": "__key__"}
"""Columns of tar shards, as the library ``datasets`` names them."""


def test_tar_shards_are_tables_of_the_library(tmp_path, datasets):
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, number in (("train-0", 0), ("train-1", 1), ("validation-0", 3)):
        files = sample(number, f"Caption {number}.", long=f"L{number}")
        tar(folder / f"{name}.tar", files)
    columns = COLUMNS | {"long_reference": "json.long"}
    data = build_data(DataConfig(format="hub", path=str(folder), columns=columns))
    assert [*data] == ["train", "val"]
    check_data(data, [*data])
    rows = data["train"]
    assert [row["image_id"] for row in rows] == ["000", "001"]
    for number in (1, 0):
        row = pickle.loads(pickle.dumps(rows))[number]
        assert row["references"] == [f"Caption {number}."]
        assert row["long_reference"] == f"L{number}"
        assert_image(row, number)
