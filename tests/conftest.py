"""Fixtures that every test file may use."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent.parent

# Each process of tests compares models with Transformers anew.
CHECKS = tempfile.TemporaryDirectory()
os.environ["RL_CAPTION_CHECKS"] = CHECKS.name

# Without hypothesis' limit of 200 ms an example: results must not depend on the machine's load.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

# A suite that a shell starts in the background ignores Ctrl-C, and so would every program that a
# test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup a hangup is ignored. With a handler in this process, programs that a test starts
# receive it, and this process goes on.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(autouse=True)
def trust_of_one_test(monkeypatch):
    """Undo a test's trusted classes, and its changes of ``sys.path``, after the test."""
    monkeypatch.setattr("rewards.trust._trusted", set())
    monkeypatch.setattr("sys.path", [*sys.path])


@pytest.fixture
def random_weights(monkeypatch):
    """Accept answers of language models with random weights, whatever their
    probability.
    """
    monkeypatch.setattr("rewards.language.models.LEAST_PROBABILITY", 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Escape names of files that are not UTF-8 in a test's output, which xdist cannot
    send.
    """
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode())
        for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def shared_data():
    """Folder with the public datasets that are not shipped with the package; skips the
    test where it is absent.

    It is ``$RL_CAPTION_SHARED_DATA`` if that is set, else ``shared/data`` beside the repository.
    """
    folder = Path(
        os.environ.get("RL_CAPTION_SHARED_DATA", REPOSITORY.parent / "shared" / "data")
    )
    if not folder.is_dir():
        pytest.skip(
            f"no datasets in {folder}: set RL_CAPTION_SHARED_DATA to the folder that holds them"
        )
    return folder


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """A tiny captioner, exported after two steps of cross-entropy."""
    from tests.training_for_tests import checked_run, xe_config

    folder = tmp_path_factory.mktemp("start") / "xe"
    checked_run(
        xe_config(folder, **{"train.max_steps": 2, "model.kwargs.dropout": 0.0}), folder
    )
    return folder / "export/best"
