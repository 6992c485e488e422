"""Data sets of the hub, Parquet files and published layouts, each made small here: rows, splits,
errors.
"""

import io
import json
import pickle
import tarfile

import pytest

from rewards.base import RewardError
from rewards.images import image_identity, open_image
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
    return list(build_data(DataConfig(**config)).split(split))


# --- published layouts --------------------------------------------------------------------------


def nocaps(folder):
    domains = ("in-domain", "near-domain", "near-domain")
    images = [
        {"id": number, "file_name": f"{number}.png", "domain": domain}
        for number, domain in enumerate(domains)
    ]
    for number, _ in enumerate(domains):
        photo(folder / "validation" / f"{number}.png", number)
    annotations = [
        {"id": number, "image_id": number % 3, "caption": f"Caption {number} ."}
        for number in range(6)
    ]
    return {"licenses": [], "images": images, "annotations": annotations}


def test_nocaps_is_one_split_or_one_for_each_domain(tmp_path):
    path = write(tmp_path / "nocaps_val_4500_captions.json", nocaps(tmp_path))
    config = DataConfig(format="coco", path=str(path), image_root="validation")
    data = build_data(config)
    assert data.splits == ("val",)
    check_data(data, ["val"])
    row = data.split("val")[1]
    image = str(tmp_path / "validation" / "1.png")
    assert row == {
        "image_id": "1",
        "image": image,
        "references": ["Caption 1 .", "Caption 4 ."],
    }
    config.kwargs = {"split_by": "domain"}
    domains = build_data(config)
    assert domains.splits == ("in-domain", "near-domain")
    assert [row["image_id"] for row in domains.split("near-domain")] == ["1", "2"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"annotations": [{"image_id": 7, "caption": "a"}]}, "'7'"),
        (
            {"images": [{"id": 1, "file_name": "a"}, {"id": "1", "file_name": "b"}]},
            "'1'",
        ),
    ],
)
def test_wrong_annotations_are_named(tmp_path, change, part):
    path = write(tmp_path / "captions.json", nocaps(tmp_path) | change)
    with pytest.raises(DataError) as caught:
        build_data(DataConfig(format="coco", path=str(path)))
    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def conversation(number, text):
    turns = [
        {"from": "human", "value": "<image>\nDescribe it."},
        {"from": "gpt", "value": text},
    ]
    return {
        "id": f"{number:012d}",
        "image": f"coco/train2017/{number}.png",
        "conversations": turns,
    }


def test_of_sharegpt4v_the_first_images_are_held_out_and_the_last_turn_is_the_caption(
    tmp_path,
):
    texts = [f"A dog {number}.\n\nIt is on a red couch." for number in range(5)]
    path = write(
        tmp_path / "captions.json",
        [conversation(number, text) for number, text in enumerate(texts)],
    )
    for number in range(5):
        photo(tmp_path / "data" / "coco" / "train2017" / f"{number}.png", number)
    config = DataConfig(
        format="sharegpt4v", path=str(path), image_root="data", kwargs={"val_images": 2}
    )
    data = build_data(config)
    assert (len(data.split("val")), len(data.split("train"))) == (2, 3)
    check_data(data, data.splits)
    row = data.split("train")[0]
    assert (
        row["references"]
        == [row["long_reference"]]
        == ["A dog 2.  It is on a red couch."]
    )
    assert (row["image_id"], row["image"]) == (
        "coco/train2017/2.png",
        f"{tmp_path}/data/coco/train2017/2.png",
    )


def test_summaries_of_sdci_are_references_and_images_without_are_left_out(tmp_path):
    folder = tmp_path / "densely_captioned_images"
    summaries = {
        "a": {"base": ["A cat.", "A cat sits."], "m-1": ["An ear."]},
        "b": {"base": "A dog."},
        "c": None,
    }
    for name, values in summaries.items():
        photo(folder / "photos" / f"sa_{name}.png", ord(name))
        content = {
            "image": f"sa_{name}.png",
            "short_caption": "It.",
            "mask_data": {},
            "summaries": values,
        }
        write(folder / "complete" / f"{name}.json", content)
    write(folder / "splits.json", {"train": ["a.json", "c.json"], "valid": ["b.json"]})
    data = build_data(DataConfig(format="dci", path=str(folder)))
    assert [row["references"] for row in data.split("train")] == [
        ["A cat.", "A cat sits."]
    ]
    assert [(row["image_id"], row["long_reference"]) for row in data.split("val")] == [
        ("b.json", "A dog.")
    ]
    check_data(data, data.splits)


def test_urban_1k_pairs_files_by_name_and_reads_the_first_line(tmp_path):
    for number in (1, 2, 10):
        photo(tmp_path / "image" / f"{number}.png", number)
        write(tmp_path / "caption" / f"{number}.txt", f"A street {number}.\nMore.")
    assert [
        (row["image_id"], row["references"])
        for row in rows_of("test", format="urban1k", path=str(tmp_path))
    ] == [
        ("1", ["A street 1."]),
        ("2", ["A street 2."]),
        ("10", ["A street 10."]),
    ]


def test_json_lines_of_other_layouts_are_read_by_columns(tmp_path):
    line = {"image/key": "aar_1", "IIW": "A red car.", "part": "test", "objects": []}
    path = write(tmp_path / "data.jsonlines", json.dumps(line) + "\n")
    columns = {"image": "{image/key}.png", "references": "IIW", "split": "part"}
    config = {"format": "jsonl", "path": str(path), "image_root": "images"}
    (row,) = rows_of("test", columns=columns, **config)
    assert row["references"] == ["A red car."]
    assert row["image"] == str(tmp_path / "images" / "aar_1.png")


def test_columns_that_are_not_there_are_named(tmp_path):
    path = write(
        tmp_path / "data.jsonl",
        json.dumps({"file": "a.png", "text": "A car.", "objects": [{}]}) + "\n",
    )
    for columns, part in (
        ({"image": "file", "references": "texts"}, "data.columns.references"),
        ({"image": "{folder}/{file}", "references": "text"}, "data.columns.image"),
        ({"image": "file", "caption": "text"}, "'caption'"),
        ({"image": "file", "references": "objects"}, "references"),
    ):
        with pytest.raises(DataError) as caught:
            build_data(DataConfig(format="jsonl", path=str(path), columns=columns))
        assert part in str(caught.value)


# --- the hub and Parquet ------------------------------------------------------------------------


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return library


def tables(datasets, folder):
    """Two splits, one of them in two files, as the hub stores them."""
    folder.mkdir()
    for name, numbers in (
        ("train-00000-of-00002", [0, 1]),
        ("train-00001-of-00002", [2]),
        ("validation", [3]),
    ):
        columns = {
            "picture": [
                {"bytes": encoded(number), "path": f"{number}.png"}
                for number in numbers
            ],
            "captions": [[f"Caption {number}.", "A thing."] for number in numbers],
            "number": numbers,
        }
        table = datasets.Dataset.from_dict(columns)
        table.cast_column("picture", datasets.Image()).to_parquet(
            folder / f"{name}.parquet"
        )
    return folder


def test_parquet_and_a_data_set_of_the_hub_have_images_in_their_rows(
    tmp_path, datasets
):
    folder = tables(datasets, tmp_path / "data")
    columns = {"image": "picture", "references": "captions", "image_id": "{number}"}
    data = build_data(DataConfig(format="hub", path=str(folder), columns=columns))
    assert sorted(data.splits) == ["train", "val"]
    check_data(data, data.splits)
    rows = list(data.split("train"))
    assert [row["image_id"] for row in rows] == ["0", "1", "2"]
    assert rows[2]["references"] == ["Caption 2.", "A thing."]
    for number, row in enumerate(pickle.loads(pickle.dumps(rows))):
        assert (
            open_image(row["image"]).tobytes() == noise_image(number, (8, 8)).tobytes()
        )
    assert len({image_identity(row["image"]) for row in rows}) == 3
    del columns["image_id"]
    numbered = build_data(DataConfig(format="hub", path=str(folder), columns=columns))
    assert [row["image_id"] for row in numbered.split("val")] == ["val/0"]


def test_images_may_be_paths_and_sentences_objects(tmp_path, datasets):
    columns = {
        "filepath": ["val2014"],
        "filename": ["1.png"],
        "sentences": [[{"raw": "A dog ."}, {"raw": "A cat ."}]],
    }
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "rows.parquet")
    photo(tmp_path / "photos" / "val2014" / "1.png")
    named = {"image": "{filepath}/{filename}", "references": "sentences"}
    config = DataConfig(
        format="hub",
        path=str(tmp_path / "rows.parquet"),
        image_root=str(tmp_path / "photos"),
        columns=named,
    )
    data = build_data(config)
    (row,) = data.split("train")
    assert (row["references"], row["image"]) == (
        ["A dog .", "A cat ."],
        str(tmp_path / "photos/val2014/1.png"),
    )
    check_data(data, data.splits)


def test_what_is_wrong_with_a_table_is_named(tmp_path, datasets):
    columns = {"image": [{"bytes": b"none", "path": None}], "text": ["A dog."]}
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict(columns).to_parquet(path)
    named = {"image": "image", "references": "text"}
    data = build_data(DataConfig(format="hub", path=str(path), columns=named))
    with pytest.raises(
        DataError, match=r"1 unreadable images: train .*rows\.parquet.*row 0"
    ):
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
    assert data.splits == ("train", "val")
    check_data(data, data.splits)
    rows = data.split("train")
    assert [row["image_id"] for row in rows] == ["000", "001"]
    for number in (1, 0):
        row = pickle.loads(pickle.dumps(rows))[number]
        assert row["references"] == [f"Caption {number}."]
        assert row["long_reference"] == f"L{number}"
        assert (
            open_image(row["image"]).tobytes() == noise_image(number, (8, 8)).tobytes()
        )
    alone = str(folder / "train-0.tar")
    tar(folder / "train-0.tar", {"000.png": b"none", "000.txt": b"x"})
    (row,) = rows_of(format="hub", path=alone, columns=COLUMNS)
    with pytest.raises(RewardError, match=r"train-0\.tar.*row 0"):
        open_image(row["image"])


# --- where the files come from ------------------------------------------------------------------
