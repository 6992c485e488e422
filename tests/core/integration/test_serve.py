"""The reward server, its client, and the adapters for other frameworks, called as the
frameworks call them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from PIL import Image

from rewards.base import RewardError
from rewards.images import open_image
from rewards.mixed import MixedReward
from rewards.registry import build
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.integrations import openrlhf
from rl_caption.integrations.app import make_app
from rl_caption.integrations.batching import scores_rows_alone
from rl_caption.integrations.client import RewardClient, ServerError
from rl_caption.integrations.config import ServeConfig
from rl_caption.integrations.server import build_served_reward
from rl_caption.integrations.swift import ServedReward
from rl_caption.runtime.errors import ConfigError

uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")
REFERENCES = [
    ["a dog runs on grass", "a brown dog"],
    ["two cats sleep on a bed", "cats in bed"],
]
CAPTIONS = ["a dog runs", "a cat on a bed"]


class Closed:
    """Scores 1, and fails where a caption is "bad"; every call waits for ``gate``."""

    __name__, columns, bounds, signature = "closed", frozenset(), (0.0, 1.0), "closed"

    def __init__(self):
        self.gate = threading.Event()
        self.sizes = []

    def __call__(self, prompts, completions, **columns):
        self.sizes.append(len(completions))
        assert self.gate.wait(30)
        if "bad" in completions:
            raise RewardError(f"caption {list(completions).index('bad')} is bad")
        return [1.0] * len(completions)


class Width:
    """The width of an image in pixels."""

    __name__, columns, bounds, signature = "width", {"image"}, (0.0, 1e6), "width"

    def __call__(self, prompts, completions, **columns):
        return [float(open_image(image).width) for image in columns["image"]]


@contextmanager
def served(reward, **options):
    """The address of a server of ``reward`` in a thread."""
    if not isinstance(reward, MixedReward):
        reward = MixedReward({reward.__name__: (reward, 1.0)})
    config = ServeConfig(**options)
    app = make_app(config, reward)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # a request waits until the server has started
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


def wait_until(condition):
    """Wait for ``condition``, 30 seconds at most."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "nothing happened in 30 seconds"
        time.sleep(0.01)


def client_of(url, **options):
    return RewardClient(url, **{"timeout": 30.0, "attempts": 1} | options)


def cider(name="cider"):
    """CIDEr-D, or another reward that needs document frequencies."""
    return build(name, df=DocumentFrequencies.from_texts(REFERENCES, eos=True))


def mixture(**rewards):
    """A mixture of ``rewards``, by default of three."""
    if rewards:
        return MixedReward({name: (reward, 1.0) for name, reward in rewards.items()})
    terms = {
        "cider": (cider(), 1.0),
        "rouge": (build("rouge_l"), 0.5),
        "again": (build("repetition"), -0.1),
    }
    return MixedReward(terms)


def status_of(url, content, **headers):
    """Status and answer of a request to score."""
    headers = {"Content-Type": "application/json"} | headers
    request = urllib.request.Request(f"{url}/score", content, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_scores_are_those_of_the_reward_to_the_last_bit():
    reward = mixture()
    with served(reward) as url:
        scores = client_of(url).score(CAPTIONS, references=REFERENCES)
        health = client_of(url).health()
    terms = reward.terms(None, CAPTIONS, references=REFERENCES)
    assert (scores.terms, scores.total) == (terms, reward.combine(terms))
    assert health["columns"] == ["references"]
    assert health["signature"] == reward.signature


def test_rewards_from_outside_have_calls_of_their_own_and_a_bad_one_fails_alone():
    reward = Closed()
    with served(reward) as url, ThreadPoolExecutor(4) as pool:
        score = client_of(url).score
        first = pool.submit(score, ["a"])
        wait_until(lambda: reward.sizes)
        later = [pool.submit(score, texts) for texts in (["b"], ["c", "bad"])]
        wait_until(lambda: client_of(url).health()["pending"] == 4)
        reward.gate.set()
        assert [first.result().total, later[0].result().total] == [[1.0]] * 2
        with pytest.raises(ServerError, match=r"422: .*closed"):
            later[1].result()
    assert sorted(reward.sizes) == [1, 1, 2]


def test_rows_of_known_rewards_share_calls_and_a_bad_request_fails_alone(monkeypatch):
    sizes = []
    reward = mixture(rouge=build("rouge_l"))
    score, gate = reward.terms, threading.Event()

    def terms(prompts, completions, **columns):
        sizes.append(len(completions))
        assert gate.wait(30)
        return score(prompts, completions, **columns)

    monkeypatch.setattr(reward, "terms", terms)
    with served(reward, max_batch=7) as url, ThreadPoolExecutor(8) as pool:
        client = client_of(url)
        first = pool.submit(client.score, CAPTIONS[:1], references=REFERENCES[:1])
        wait_until(lambda: sizes)
        # two calls of three requests, of which the first has a bad one
        orders = [slice(None), slice(None, None, -1)] * 3
        requests = [(CAPTIONS[order], REFERENCES[order]) for order in orders]
        requests[0] = (["a", "b"], [["x"], []])
        later = []
        for count, (texts, references) in enumerate(requests, start=1):
            later.append(pool.submit(client.score, texts, references=references))
            wait_until(
                lambda pending=1 + 2 * count: client.health()["pending"] == pending
            )
        gate.set()
        expected = score(None, CAPTIONS, references=REFERENCES)["rouge"]
        assert first.result().total == expected[:1]
        bad, *good = later
        with pytest.raises(ServerError, match=r"422.*'rouge'.*row 1"):
            bad.result()
        totals = [request.result().total for request in good]
        assert totals == [expected[order] for order in orders[1:]]
        # at most max_batch a call; each of the bad call alone
        assert sizes == [1, 6, 2, 2, 2, 6]


def test_captions_that_are_compared_with_those_of_their_call_share_none():
    assert scores_rows_alone(mixture())
    compared = mixture(rouge=build("rouge_l"), other=cider("diversity"))
    assert not scores_rows_alone(compared)
    normalized = MixedReward({"cider": (cider(), 1.0)}, normalize="per_term")
    assert not scores_rows_alone(normalized)


def test_a_full_queue_answers_503_and_the_client_tries_again_but_never_makes_a_score_up():
    reward = Closed()
    with served(reward, max_pending=2) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(client_of(url).score, ["a", "b"])
        wait_until(lambda: reward.sizes)
        with pytest.raises(ServerError, match="503"):
            client_of(url, attempts=2, backoff=0.01).score(["c"])
        patient = pool.submit(client_of(url, attempts=50, backoff=0.05).score, ["c"])
        threading.Timer(0.3, reward.gate.set).start()
        assert (first.result().total, patient.result().total) == ([1.0, 1.0], [1.0])
    with pytest.raises(ServerError, match="2 attempts"):
        client_of(url, attempts=2, backoff=0.01).score(["c"])


@pytest.mark.parametrize(
    ("content", "status", "named"),
    [
        (b"{", 422, ""),
        (b'{"captions": ["a"], "caption": []}', 422, "caption"),
        (b'{"captions": ["a"]}', 422, "references"),
        (b'{"captions": ["a"], "columns": {"finished": [1, 1]}}', 422, "finished"),
        (
            b'{"captions": ["a"], "columns": {"references": [["x"]], "finish": [1]}}',
            422,
            "'finish'",
        ),
        (b'{"captions": ["' + b"a" * 2**21 + b'"]}', 413, "MiB"),
    ],
)
def test_a_bad_request_is_refused(content, status, named):
    with served(mixture(rouge=build("rouge_l")), max_mb=1.0) as url:
        code, answer = status_of(url, content)
        assert code == status
        assert named in answer
        assert client_of(url).score(CAPTIONS, references=REFERENCES).total, (
            "the server lives on"
        )


def test_a_body_that_does_not_arrive_is_refused(monkeypatch):
    monkeypatch.setattr("rl_caption.integrations.app.BODY_SECONDS", 0.5)
    request = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    with served(mixture()) as url:
        port = int(url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), 30) as client:
            client.sendall(request)
            assert client.recv(100).startswith(b"HTTP/1.1 408 ")


def test_images_come_from_below_named_folders_or_as_content(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    Image.new("RGB", (30, 20)).save(root / "inside.png")
    Image.new("RGB", (40, 20)).save(tmp_path / "outside.png")
    Image.new("RGB", (2000, 2000)).save(root / "large.png")
    (root / "text.png").write_text("no image")
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    with served(Width(), images={"root": str(root)}, max_megapixels=1.0) as url:
        client = client_of(url)
        content = (root / "inside.png").read_bytes()
        images = ["root/inside.png", content, root / "inside.png"]
        assert client.score(["a", "b", "c"], image=images).total == [30.0] * 3
        for image in (
            "root/missing.png",
            "root/../outside.png",
            "root/link.png",
            str(tmp_path / "outside.png"),
            {"path": str(root / "inside.png"), "bytes": None},
        ):
            with pytest.raises(ServerError, match=r"row 1: image.*NAME/path.*'root'"):
                client.score(["a", "b"], image=["root/inside.png", image])
        for image in ("root/large.png", "root/text.png", root / "large.png", b"!"):
            with pytest.raises(ServerError, match=r"422.*[iI]mage"):
                client.score(["a", "b"], image=["root/inside.png", image])


def test_a_token_is_required_where_there_is_one_and_other_hosts_need_one(monkeypatch):
    monkeypatch.delenv("RL_CAPTION_TOKEN", raising=False)
    with pytest.raises(ValueError, match="RL_CAPTION_TOKEN"):
        ServeConfig(host="0.0.0.0")
    body = json.dumps({"captions": ["a"], "columns": {"references": [["a"]]}}).encode()
    with served(mixture(rouge=build("rouge_l"))) as url:
        assert status_of(url, body, Host="attacker.example")[0] == 400
        monkeypatch.setenv("RL_CAPTION_TOKEN", "secret")
        ServeConfig(host="0.0.0.0")
        assert status_of(url, body)[0] == 401
        assert status_of(url, body, Authorization="Bearer other")[0] == 401
        assert client_of(url).score(["a"], references=[["a"]]).total == [1.0]


def test_cider_needs_document_frequencies():
    with pytest.raises(ConfigError, match=r"reward\.df"):
        build_served_reward(ServeConfig())


def test_adapters_score_as_the_reward_does(monkeypatch, tmp_path):
    reward = mixture()
    expected = reward(None, CAPTIONS, references=REFERENCES)
    unfinished = reward(None, CAPTIONS, references=REFERENCES, finished=[True, False])
    assert unfinished[1] != expected[1]
    labels = [json.dumps({"references": references}) for references in REFERENCES]
    with served(reward) as url:
        monkeypatch.setenv("RL_CAPTION_URL", url)
        prompt = "<|start|><|image|><|end|>Describe.\n<|start|>assistant\n"
        expanded = prompt.replace("<|image|>", "<|image|>" * 9)
        queries = [f"{expanded}{CAPTIONS[0]}<|end|>", f"{prompt}{CAPTIONS[1]}"]
        found = openrlhf.reward_func(queries, [prompt] * 2, labels)
        assert found["rewards"] == unfinished
        with pytest.raises(ValueError, match="prompt"):
            openrlhf.reward_func(queries[:1], ["Tell."], labels[:1])
        columns = {
            "references": REFERENCES,
            "solution": ["", ""],
            "trainer_state": None,
        }
        for reasons, scores in (
            ({}, expected),
            ({"finish_reason": ["stop", "length"]}, unfinished),
        ):
            assert ServedReward()(CAPTIONS, **columns, **reasons) == scores
    path = tmp_path / "9.png"
    Image.new("RGB", (30, 20)).save(path)
    images = [
        [{"bytes": None, "path": str(path)}],
        [{"bytes": path.read_bytes(), "path": None}],
    ]
    with served(Width()) as url:
        monkeypatch.setenv("RL_CAPTION_URL", url)
        assert ServedReward()(CAPTIONS, images=images) == [30.0, 30.0]


@pytest.mark.parametrize(
    ("prompt", "image", "expanded"),
    [
        ("<bos>{}Describe<end>\n<start>model\n", "<soi>", "\n\n<soi><x><x><eoi>\n\n"),
        ("User:{}Describe<end>\nAssistant:", "<image>", "<fake><global><image><fake>"),
        ("{}\nDescribe <|a|><|b|>", "<image>", "<image><image>"),
    ],
)
def test_the_prompt_is_cut_from_a_query_whose_image_has_many_tokens(
    prompt, image, expanded
):
    query = prompt.format(expanded) + "a dog</s>"
    assert openrlhf.after_prompt(query, prompt.format(image)) == "a dog</s>"


def test_the_client_and_the_adapters_need_only_the_standard_library():
    code = """
import sys
from rl_caption.integrations import client, openrlhf, swift
assert not {"torch", "numpy", "PIL", "fastapi", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


SLOW_REWARD = """
import os, time
class Slow:
    __name__, columns, bounds, signature = "slow", frozenset(), (0.0, 1.0), "slow"
    def __call__(self, prompts, completions, **columns):
        assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "16"
        time.sleep(2)
        return [0.5] * len(completions)
"""


@pytest.mark.slow
def test_sigterm_ends_the_server_after_what_it_took(tmp_path):
    (tmp_path / "my_rewards.py").write_text(SLOW_REWARD)
    terms = "terms: {slow: {weight: 1.0, target: 'my_rewards:Slow'}}"
    (tmp_path / "mix.yaml").write_text(f"reward: {{{terms}}}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["serve", "--config", "mix.yaml", "--port", port]
    command = [sys.executable, "-m", "rl_caption", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as server:
        url = f"http://127.0.0.1:{port}"
        try:
            client_of(url, attempts=30, backoff=0.5).health()
            with ThreadPoolExecutor(2) as pool:
                requests = [
                    pool.submit(client_of(url).score, ["a", "b"]) for _ in range(2)
                ]
                wait_until(lambda: client_of(url).health()["pending"] == 4)
                server.send_signal(signal.SIGTERM)
                for request in requests:
                    assert request.result().total == [0.5, 0.5]
            assert server.wait(30) in (0, -signal.SIGTERM)
        finally:
            server.kill()
