"""Files are written whole or not at all, and a failed write says which file it was and
what is free.
"""

import errno
import os
import time
from unittest.mock import Mock

import pytest

from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.files import atomic_write, remove_leftovers
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.data.files import write_json
from rl_caption.training.checkpoint import drop_after

SMALL = LCLIPConfig(
    image_size=4,
    patch_size=2,
    image_width=4,
    image_heads=1,
    text_width=4,
    text_heads=1,
    embed_dim=4,
    vocab_size=8,
)


WRITERS = {
    "new.json": lambda path: write_json(path, {"a": 1}),
    "df.npz": lambda path: DocumentFrequencies.from_references(
        [[["a", "dog"]]], eos=True
    ).save(path),
    "model.safetensors": lambda path: LCLIP(SMALL).save_pretrained(path.parent),
    "metrics.jsonl": lambda path: drop_after(path, 0),
}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_full_disk_names_the_file_and_the_free_space_and_leaves_the_old_file(
    tmp_path, monkeypatch, name
):
    path = tmp_path / name
    path.write_text("{}" if name != "metrics.jsonl" else '{"step": 0}\n')
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(
            os,
            "fsync",
            Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        )
        with pytest.raises(OSError, match=r"[\d.]+ MB") as raised:
            WRITERS[name](path)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == before
    assert not [found for found in names(tmp_path) if found.startswith(".")]
    WRITERS[name](path)
    assert not [found for found in names(tmp_path) if found.startswith(".")]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_whatever_ends_the_writing_the_temporary_goes(tmp_path, kind):
    with pytest.raises(kind), atomic_write(tmp_path / "new" / "a.txt") as file:  # noqa: PT012
        file.write(b"half")
        assert len(names(tmp_path / "new")) == 1
        raise kind
    assert names(tmp_path / "new") == []
    with (
        pytest.raises(FileNotFoundError, match="other"),
        atomic_write(tmp_path / "a.txt"),
    ):
        (tmp_path / "other").read_bytes()  # an error of another file keeps its name
    (tmp_path / "usual").write_bytes(b"")
    with atomic_write(tmp_path / "b.txt", sync=False):
        pass
    assert (tmp_path / "b.txt").stat().st_mode == (tmp_path / "usual").stat().st_mode, (
        "the rights of any other file"
    )


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(tmp_path):
    with atomic_write(tmp_path / "a.txt"):
        (leftover,) = names(tmp_path)
    stay = [
        ".a.txt.tmp",
        "a.txt.0123abcd.tmp",
        ".hidden",
        ".a.txt.0123abcg.tmp",
        "a.txt",
    ]
    for name in (leftover, *stay):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - 100,) * 2)
    (tmp_path / ".b.0123abcd.tmp").write_bytes(b"another process is at it")
    (tmp_path / ".folder.0123abcd.tmp").mkdir()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([*stay, ".b.0123abcd.tmp", ".folder.0123abcd.tmp"])
    remove_leftovers(tmp_path / "absent")
