"""Damaged files of predictions and of references end in one message that names the file, or are read rightly."""

import copy
import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_caption.cli.main import main
from rl_caption.evaluation import evaluate_captions
from tests.captions_for_tests import CAPTIONS, REFERENCES

pytestmark = pytest.mark.slow

PREDICTIONS = [{"image_id": int(key), "caption": text} for key, text in CAPTIONS.items()]
LISTED = [{"image_id": int(key), "captions": texts} for key, texts in REFERENCES.items()]
COCO = {
    "images": [{"id": int(key), "file_name": f"{key}.jpg"} for key in REFERENCES],
    "annotations": [
        {"image_id": int(key), "caption": text}
        for key, texts in REFERENCES.items()
        for text in texts
    ],
}
KARPATHY = {
    "images": [
        {
            "cocoid": int(key),
            "filename": f"{key}.jpg",
            "split": "test",
            "sentences": [{"raw": text} for text in texts],
        }
        for key, texts in REFERENCES.items()
    ]
}
FORMS = {"predictions": [PREDICTIONS], "references": [REFERENCES, LISTED, COCO, KARPATHY]}
ODD: list[Any] = [
    None,
    True,
    1.5,
    [],
    {},
    "",
    " ",
    "\ud800",
    [[]],
    [None],
    [" "],
    ["\udfff"],
    {"0": "a"},
    "9" * 5000,
]
Content = bytes | Callable[[Path], object]
"""What a file holds, or what makes it."""


def places(content: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    found = [(content, key) for key in keys]
    for key in keys:
        if isinstance(content[key], dict | list):
            found += places(content[key])
    return found


WHOLE: dict[str, Content] = {
    "empty": b"",
    "white space": b" \n",
    "null": b"null",
    "number": b"5",
    "infinity": b"1e999",
    "string": b'"text"',
    "empty list": b"[]",
    "empty object": b"{}",
    "list of lists": b"[[]]",
    "list of numbers": b"[1, 2]",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "open brackets": b"[" * 100_000,
    "less deep": b'{"1": ' + b"[" * 900 + b"]" * 900 + b"}",
    "digits in a list": b"[" + b"1" * 5000 + b"]",
    "NUL bytes": bytes(100),
    "NUL in a list": b"[\0]",
    "not UTF-8": b'["\xff\xfe\xfa"]',
    "half of UTF-16": b"\xff\xfe[",
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(20),
    "gzip, cut": gzip.compress(b"[" + b" " * 1000 + b"]")[:-9],
    "gzip, damaged": gzip.compress(b"[1]")[:-8] + bytes(8),
    "gzip, not at all": b"\x1f\x8bnothing of the kind",
    "gzip, of nothing": gzip.compress(b""),
    "gzip, of gzip": gzip.compress(gzip.compress(b"[]")),
    "two values": b"[]\n[]",
    "absent": lambda path: None,
    "folder": Path.mkdir,
    "pipe without a writer": os.mkfifo,
    "link to itself": lambda path: path.symlink_to(path),
}


def variants(form: Any, draw: random.Random) -> dict[str, bytes]:
    """Damage to a good file: cut, bytes changed, values replaced, keys repeated and left out."""
    text = json.dumps(form).encode()
    found = {f"cut {n}": text[: draw.randrange(1, len(text))] for n in range(4)}
    for n in range(8):
        damaged = bytearray(text)
        damaged[draw.randrange(len(text))] = draw.randrange(256)
        found[f"byte {n}"] = bytes(damaged)
    for n, odd in enumerate(ODD):
        changed = copy.deepcopy(form)
        container, key = draw.choice(places(changed))
        container[key] = odd
        found[f"value {n} at {key}"] = json.dumps(changed).encode()
    changed = copy.deepcopy(form)
    container, key = draw.choice([place for place in places(changed) if isinstance(place[0], dict)])
    del container[key]
    found[f"without {key}"] = json.dumps(changed).encode()
    first = draw.choice(
        sorted({key for container, key in places(form) if isinstance(container, dict)})
    )
    found[f"{first} twice"] = text.replace(
        f'"{first}": '.encode(), f'"{first}": 1, "{first}": '.encode(), 1
    )
    return found | {
        "gzip": gzip.compress(text),
        "byte order mark": b"\xef\xbb\xbf" + text,
        "UTF-16": text.decode().encode("utf-16"),
        "NUL at the end": text + b"\0",
        "digits of an id": text.replace(b"1", b"1" * 5000, 1),
        "comma": text[:-1] + b"," + text[-1:],
    }


def cases() -> list[Any]:
    """Role and content of the damaged file, and the program that reads it: one of two that read files alike."""
    draw = random.Random(0)
    found: list[Any] = []
    for role, forms in FORMS.items():
        damages: list[tuple[str, Content]] = list(WHOLE.items())
        for number, form in enumerate(forms):
            damages += [
                (f"{number} {name}", content) for name, content in variants(form, draw).items()
            ]
        for number, (name, content) in enumerate(damages):
            program = ("evaluate", "score")[number % 2]
            found.append(pytest.param(role, content, program, id=f"{role}: {name}, {program}"))
    return found


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, none of whose keys may be there twice."""
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def plainly_read(path: Path, role: str) -> Any:
    """The content as the standard library reads it: what a program that succeeds must have taken it for."""
    data = path.read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    content = json.loads(data, object_pairs_hook=without_repetition)
    if role == "predictions":
        return {str(row["image_id"]): row["caption"] for row in content}
    if isinstance(content, list):
        return {str(row["image_id"]): row["captions"] for row in content}
    if "annotations" in content:
        rows = content["annotations"]
        ids = [str(image["id"]) for image in content["images"]]
        return {key: [row["caption"] for row in rows if str(row["image_id"]) == key] for key in ids}
    if "images" in content:
        return {
            str(image["cocoid"]): [
                text if isinstance(text, str) else text["raw"] for text in image["sentences"]
            ]
            for image in content["images"]
        }
    return content


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("role", "content", "program"), cases())
def test_a_damaged_file_is_named_or_rightly_read(role, content, program, tmp_path, capsys):
    files = {name: tmp_path / f"{name}.json" for name in FORMS}
    for name, path in files.items():
        path.write_text(json.dumps(FORMS[name][0]), encoding="utf-8")
    damaged, out = files[role], tmp_path / "out" / "scores.json"
    damaged.unlink()
    if isinstance(content, bytes):
        damaged.write_bytes(content)
    else:
        content(damaged)
    arguments = {
        "evaluate": [
            "--metrics=rouge",
            "--tokenizer=python",
            "--bootstrap=0",
            f"--out={out.parent}",
            "--predictions",
        ],
        "score": ["--reward=rouge_l", f"--out={out}", "--captions"],
    }
    try:
        code = main(
            [
                program,
                *arguments[program],
                str(files["predictions"]),
                f"--references={files['references']}",
            ]
        )
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    if code == 0:
        assert errors == []
        read = {name: plainly_read(path, name) for name, path in files.items()}
        expected = evaluate_captions(read["predictions"], read["references"], metrics=["rouge"])
        found = json.loads(out.read_text(encoding="utf-8"))
        mean = found["mean"] if "mean" in found else found["metrics"]["ROUGE-L"]
        assert mean == pytest.approx(expected.metrics["ROUGE-L"], rel=1e-12)
        assert expected.n == found.get("n", len(found.get("scores", ())))
    else:
        assert code == 1
        assert len(errors) == 1, said
        assert str(damaged) in errors[0]
        assert len(said) < 2000
        assert not out.exists()
