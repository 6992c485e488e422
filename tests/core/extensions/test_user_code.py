"""Code from outside that fails: one error that names the target and its key, and then
the user's own line.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from rewards.base import RewardError
from rl_caption.config.build import build_data
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError
from rl_caption.lab.config import (
    PositivesConfig,
    RecaptionConfig,
    RecaptionerConfig,
    TextToImageConfig,
)
from rl_caption.lab.recaption import make_positives, recaption
from rl_caption.reward_models.contrastive import caption_source
from rl_caption.runtime.errors import ConfigError, errors_of_user_code
from rl_caption.runtime.launch import stop_requests
from tests.core.extensions.test_captioner import GruCaptioner
from tests.training_for_tests import DATA, run, xe_config

ROWS = [{"image_id": "1", "image": "1.png", "references": ["a dog"]}]


def no_key() -> Any:
    return {}["caption"]


def leaves() -> Any:
    sys.exit(0)


def in_a_library() -> Any:
    return signal.Signals(1000)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (no_key, 'return {}["caption"]'),
        (leaves, "sys.exit(0)"),
        (in_a_library, "return signal.Signals(1000)"),
    ],
)
def test_the_target_comes_first_and_then_the_own_line(call, line):
    with pytest.raises(ConfigError) as failed, errors_of_user_code("data.target x:Y"):
        call()
    message = str(failed.value)
    assert message.startswith(f"data.target x:Y: {__file__}, line ")
    assert line in message


def test_what_is_not_the_users_passes():
    with pytest.raises(RewardError, match="as_it_is"), errors_of_user_code("key"):
        raise RewardError("as_it_is")
    with (
        pytest.raises(ConfigError, match="inner: "),
        errors_of_user_code("outer"),
        errors_of_user_code("inner"),
    ):
        no_key()


def test_a_signal_ends_the_program_while_a_users_code_runs():
    with (
        pytest.raises(SystemExit, match="143"),
        stop_requests(leave=True),
        errors_of_user_code("key"),
    ):
        signal.raise_signal(signal.SIGTERM)


class Named:
    """A target of each kind, which does what ``does`` says when it is called."""

    signature = "named"
    does: ClassVar[Callable[[], Any]] = no_key

    def __call__(self, *arguments: Any) -> Any:
        return type(self).does()


def rows_of_user() -> list[Any]:
    return [Named.does()]


NAME, DATA_NAME = f"{__name__}:Named", f"{__name__}:rows_of_user"
SCENES = DataConfig(**DATA)


RECAPTIONER = RecaptionerConfig(target=NAME)
DRAWER = TextToImageConfig(target=NAME)
KINDS = {
    NAME: (
        lambda out: recaption(
            RecaptionConfig(data=SCENES, recaptioner=RECAPTIONER, out=out)
        ),
        [None, "text", [["a", 1]] * 32, ["a"]],
    ),
    "Named": (
        lambda out: make_positives(
            PositivesConfig(data=SCENES, images=DRAWER, out=out)
        ),
        [None, "text", []],
    ),
    f"negatives.source {NAME}": (
        lambda out: caption_source(NAME, {}, ROWS),
        [None, "text", ["a cat"], [("a", 1)]],
    ),
    f"data.target {DATA_NAME}": (
        lambda out: build_data(DataConfig(target=DATA_NAME))["train"][0],
        [None, {}, ROWS[0] | {"references": "a dog"}],
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_target_that_returns_something_else_is_named(name, tmp_path, monkeypatch):
    call, answers = KINDS[name]
    for number, answer in enumerate(answers):
        monkeypatch.setattr(Named, "does", lambda answer=answer: answer)
        with pytest.raises((ConfigError, DataError, RewardError)) as failed:
            call(str(tmp_path / str(number)))
        said = str(failed.value)
        assert name.rpartition(" ")[2] in said or "named" in said, answer


class Failing(GruCaptioner):
    def preprocess(self, rows: Sequence[Any]) -> Any:
        return no_key()


def test_a_captioner_that_fails_in_a_worker_ends_the_run_with_one_line(tmp_path):
    target = f"{__name__}:Failing"
    model = {"target": target, "kwargs": {"width": 4}}
    ended = run(xe_config(tmp_path, model=model, **{"data.num_workers": 1}), tmp_path)
    assert ended.code == 1, ended.output
    assert f"error: model.target {target}: {__file__}, line " in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.parametrize("text", ["x = {}['y']", "import nowhere.at_all", "x = ("])
def test_a_module_that_cannot_be_imported_is_named(text, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"own_module_{np.abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ValueError, match=name):
        build_data(DataConfig(target=f"{name}:Data"))
