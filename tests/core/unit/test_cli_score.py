"""Files of captions and references, and the program that scores them."""

import json
from pathlib import Path

import pytest
from PIL import Image

from rewards.files import load_json
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.cli.main import run_program
from rl_caption.config.commands import ScoreConfig
from rl_caption.data.base import DataError
from rl_caption.data.files import find_images, read_captions, read_references
from rl_caption.programs import score
from rl_caption.runtime.errors import ConfigError
from tests.clip_for_tests import tiny_student

GOLDEN = Path(__file__).parents[1] / "golden" / "cider_four_images.json"
CASE = load_json(GOLDEN)["cases"][0]


def by_id(values):
    return dict(zip("1234", values, strict=True))


REFERENCES = by_id(CASE["references"])
CAPTIONS = [
    {"image_id": number, "caption": text}
    for number, text in enumerate(CASE["candidates"], 1)
]


def score_files(reward, captions, references=None, **options):
    paths = {"captions": captions, "references": references, **options}
    for name, path in paths.items():
        if isinstance(path, Path):
            paths[name] = str(path)
    return score.score_files(ScoreConfig(reward=reward, **paths))


def saved(folder, name, content):
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path):
    """Captions and references of four images."""
    return {
        "captions": saved(tmp_path, "captions.json", CAPTIONS),
        "references": saved(tmp_path, "references.json", REFERENCES),
    }


def karpathy():
    records = []
    splits = ["train", "restval", "val", "test"]
    for number, texts in enumerate(CASE["references"]):
        record = {
            "imgid": number,
            "cocoid": number + 1,
            "filename": f"COCO_{number + 1}.jpg",
            "split": splits[number],
            "sentences": [{"raw": text, "tokens": text.split()} for text in texts],
        }
        records.append(record)
    return {"dataset": "tiny", "images": records}


def test_karpathy_splits_and_ids(tmp_path):
    content = karpathy()
    path = saved(tmp_path, "dataset.json", content)
    assert list(read_references(path, "train")) == ["1", "2"]
    assert list(read_references(path, "test")) == ["4"]
    with pytest.raises(DataError, match=r"split 'dev'.*train"):
        read_references(path, "dev")
    for record in content["images"]:
        del record["cocoid"]
        for sentence in record["sentences"]:
            del sentence["raw"]
    found = read_references(saved(tmp_path, "dataset.json", content))
    assert list(found) == ["0", "1", "2", "3"]
    with pytest.raises(DataError, match=r"references\.json.*'test'"):
        read_references(saved(tmp_path, "references.json", REFERENCES), "test")


DOUBLED = [{"image": "a.png", "references": ["a"], "image_id": i} for i in (1, "1")]
UNKNOWN = {
    "images": [{"id": 1}],
    "annotations": [{"image_id": 2, "caption": "a"}],
}


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_references, {"1": ["a dog", " "], "2": ["x"]}, "1 images .*first: '1'"),
        (read_references, DOUBLED, "1 images .*first: '1'"),
        (read_references, UNKNOWN, "not listed: '"),
        (
            read_references,
            {"images": [{"id": 1}, {"id": 1}], "annotations": []},
            "under 'images'",
        ),
        (read_references, '{"1": ["a dog"], "1": ["a cat"]}', "'1'"),
        (read_references, '{"1": "a dog"}', "'1'"),
        (read_captions, [*CAPTIONS, CAPTIONS[1], CAPTIONS[1]], "2 images .*first: '2'"),
    ],
)
def test_bad_files_are_explained(tmp_path, read, content, message):
    with pytest.raises(DataError, match=rf"file\.json.*{message}"):
        read(saved(tmp_path, "file.json", content))


def json_lines(rows):
    return "".join(json.dumps(row) + "\n\n" for row in rows)


def test_references_and_captions_may_be_json_lines(tmp_path):
    first = {"image": "photos/1.jpg", "references": ["a dog"]}
    second = {"image": "photos/2.jpg", "references": ["a cat"]}
    second |= {"split": "test", "image_id": 7}
    path = saved(tmp_path, "data.jsonl", json_lines([first, second]))
    assert read_references(path) == {"photos/1.jpg": ["a dog"], "7": ["a cat"]}
    assert read_references(path, "test") == {"7": ["a cat"]}
    assert read_references(path, "test").elsewhere == {"photos/1.jpg"}
    assert read_references(path, "train", by="image_name") == {"1.jpg": ["a dog"]}
    listed = [
        {
            "image_id": 7,
            "image_name": "7.jpg",
            "captions": ["a cat", "one cat"],
        }
    ]
    file = saved(tmp_path, "listed.json", listed)
    assert read_references(file) == {"7": ["a cat", "one cat"]}
    assert read_references(file, by="image_name") == {"7.jpg": ["a cat", "one cat"]}
    one = saved(tmp_path, "one.jsonl", json.dumps(first))
    assert read_references(one) == {"photos/1.jpg": ["a dog"]}
    assert read_references(one, "test", has_splits=False)
    wrong = [second, {"image": "photos/1.jpg", "refernces": ["a dog"]}]
    with pytest.raises(DataError, match=r"data\.jsonl, row 2.*references"):
        read_references(
            saved(tmp_path, "data.jsonl", "\n".join(map(json.dumps, wrong)))
        )
    captions = [
        {"image": "photos/1.jpg", "caption": "a dog"},
        {"image": "photos/2.jpg", "image_id": 7, "caption": "a cat"},
    ]
    file = saved(tmp_path, "captions.jsonl", json_lines(captions))
    assert read_captions(file) == {"photos/1.jpg": "a dog", "7": "a cat"}


def test_captions_by_path_are_scored_as_they_are(tmp_path, monkeypatch):
    folder = tmp_path / "my/photos"
    folder.mkdir(parents=True)
    rows = []
    for key, texts in REFERENCES.items():
        Image.new("RGB", (32, 32)).save(folder / f"{key}.png")
        rows.append({"image": f"photos/{key}.png", "references": texts})
    references = saved(tmp_path / "my", "data.jsonl", json_lines(rows))
    by_id = saved(tmp_path, "by_id.json", REFERENCES)
    tiny_student(tmp_path / "student")
    student = {"backbone": str(tmp_path / "student")}
    monkeypatch.chdir(tmp_path)
    written = [
        row | {"image_id": f"my/photos/{row['image_id']}.png"} for row in CAPTIONS
    ]
    captions = saved(tmp_path, "captions.json", written)

    def scores(reward, **sources):
        return [*score_files(reward, captions, **sources)["scores"].values()]

    plain = score_files("cider", saved(tmp_path, "plain.json", CAPTIONS), by_id)
    expected = [*plain["scores"].values()]
    assert scores("cider", references=references) == expected
    assert scores("cider", references=by_id) == expected
    with pytest.raises(DataError, match="give --references or --images"):
        scores("l_clipscore", kwargs=student)
    looked = scores("l_clipscore", images=".", kwargs=student)
    assert looked == scores("l_clipscore", images="my/photos", kwargs=student)
    assert looked == scores("l_clipscore", references=references, kwargs=student)


def test_only_images_are_found_and_an_exact_name_wins(tmp_path):
    names = "1.txt 1.png x_1.png ._1.png y_02.png z_2.png 3.jpg.png 3.jpg 4.txt"
    (tmp_path / "sub").mkdir()
    for name in (*names.split(), "sub/COCO_val2014_000000391895.jpg"):
        (tmp_path / name).touch()
    expected = {
        "1": "1.png",
        "1.png": "1.png",
        "x_1": "x_1.png",
        "3.jpg": "3.jpg",
        "3": "3.jpg",
        "y_02": "y_02.png",
        "391895": "COCO_val2014_000000391895.jpg",
    }
    found = find_images(tmp_path, [*expected])
    assert [Path(path).name for path in found] == [*expected.values()]
    with pytest.raises(DataError, match=r"exactly one file.*'2'"):
        find_images(tmp_path, ["1", "2"])
    with pytest.raises(DataError, match=r"exactly one file.*'4'"):
        find_images(tmp_path, ["4"])


# the program


def test_files_are_scored_the_published_way(tmp_path):
    captions = saved(tmp_path, "captions.json", CAPTIONS)
    references = saved(tmp_path, "references.json", karpathy())
    result = score_files("cider", captions, references, out=tmp_path / "scores.json")
    assert result["signature"] == "NO<EOS>_w/oInit+Cider-D[n4,s6.0]"
    assert result["scores"] == pytest.approx(by_id(CASE["cider_d"]), rel=1e-12)
    assert result["mean"] == pytest.approx(2.9901221045895823, rel=1e-12)
    assert load_json(tmp_path / "scores.json") == result
    named = [
        {"image_name": f"COCO_{row['image_id']}.jpg", "caption": row["caption"]}
        for row in CAPTIONS
    ]
    by_name = score_files("cider", saved(tmp_path, "named.json", named), references)
    for key, value in result["scores"].items():
        assert by_name["scores"][f"COCO_{key}.jpg"] == value


def test_texts_not_compared_with_the_toolkits_tokeniser_are_counted_in_the_signature(
    files, tmp_path
):
    captions = [CAPTIONS[0] | {"caption": "a sign that reads 猫"}, *CAPTIONS[1:]]
    saved(tmp_path, "captions.json", captions)
    found = score_files("cider", **files)
    assert "+PTB-python[1 of " in found["signature"]


def test_eos_and_document_frequencies_by_request(files, tmp_path):
    references = files["references"]
    result = score_files("cider", **files, eos=True)
    expected = by_id(CASE["cider_d_eos"])
    assert result["scores"] == pytest.approx(expected, rel=1e-12)
    path = tmp_path / "df.npz"
    df = DocumentFrequencies.from_texts(CASE["references"], eos=False)
    df.save(path)
    one = saved(tmp_path, "one.json", CAPTIONS[:1])
    result = score_files("cider", one, references, df=path)
    (score,) = result["scores"].values()
    assert score == pytest.approx(CASE["cider_d"][0], rel=1e-12)
    signature = f"NO<EOS>_wInit+Cider-D[n4,s6.0]+df[{df.fingerprint[:8]}]"
    assert result["signature"] == signature
    with pytest.raises(ConfigError, match="eos=False"):
        score_files("cider", one, references, df=path, eos=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": "cidr"}, "'cidr'.*cider"),
        ({"references": None}, "--references"),
        ({"kwargs": {"sigma": 0}}, "sigma is 0"),
        ({"kwargs": {"n": 0}}, "n is 0"),
        ({"df": "absent.npz"}, "absent.npz"),
    ],
)
def test_what_cannot_be_scored_is_explained(files, arguments, message):
    with pytest.raises((DataError, ConfigError), match=message):
        score_files(**{"reward": "cider", **files, **arguments})


def test_text_that_is_tokenised_already_is_scored_as_it_is(tmp_path):
    """The tokenizer would remove ``.`` and lower-case the rest."""
    texts = [f"A {text} ." for text in CASE["candidates"]]
    references = [[f"A {text} ." for text in own] for own in CASE["references"]]
    captions = saved(tmp_path, "c.json", by_id(texts))
    given = saved(tmp_path, "r.json", by_id(references))
    found = score_files("cider", captions, given, tokenizer="none")
    reward = CiderD(eos=False, tokenizer="none")
    expected = reward(None, texts, references=references)
    assert found["scores"] == by_id(expected)
    assert found["signature"] == reward.signature
    assert found["scores"] != score_files("cider", captions, given)["scores"]


def test_scores_that_can_only_be_0_are_warned_of(files, tmp_path, caplog):
    score_files("cider", **files)
    assert not caplog.records
    same = saved(tmp_path, "r.json", dict.fromkeys(REFERENCES, REFERENCES["1"]))
    one = saved(tmp_path, "c.json", CAPTIONS[:1])
    assert score_files("cider", one, same)["mean"] == 0
    assert "(1)" in caplog.text


def test_main_prints_the_scale_and_writes(files, tmp_path, capsys):
    arguments = ["--reward=cider"]
    arguments += [f"--{name}={path}" for name, path in files.items()]
    more = ["--out", str(tmp_path / "s.json"), "--kwargs", '{"sigma": 6}']
    assert run_program("score", [*arguments, *more]) == 0
    printed = capsys.readouterr().out
    assert "cider 2.990122 (mean of 4 captions" in printed
    assert "[0, 10]" in printed
    assert load_json(tmp_path / "s.json")["mean"] == pytest.approx(2.9901221045895823)
