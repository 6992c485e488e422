"""The reward server, its client, and the adapters for other frameworks, called as the frameworks call them."""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from rewards.base import Reward, RewardError
from rewards.images import image_identity, open_image
from rewards.mixed import MixedReward
from rewards.registry import build
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.integrations import easyr1, openrlhf, verl
from rl_caption.integrations.batching import BatchingScorer
from rl_caption.integrations.capevalkit import as_metric
from rl_caption.integrations.client import RewardClient, ServerError
from rl_caption.integrations.config import ServeConfig
from rl_caption.integrations.requests import EncodedImage
from rl_caption.integrations.server import build_app, build_served_reward
from rl_caption.integrations.swift import ServedReward
from rl_caption.runtime.errors import ConfigError

uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")
REFERENCES = [["a dog runs on grass", "a brown dog"], ["two cats sleep on a bed", "cats in bed"]]
CAPTIONS = ["a dog runs", "a cat on a bed"]


class Closed:
    """Scores 1, and fails where a caption is "bad"; every call waits for ``gate``."""

    __name__ = "closed"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, 1.0)
    signature = "closed"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.sizes: list[int] = []

    def __call__(self, prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
        self.sizes.append(len(completions))
        assert self.gate.wait(30)
        if "bad" in completions:
            raise RewardError(f"caption {list(completions).index('bad')} is bad")
        return [1.0] * len(completions)


class Width:
    """The width of an image in pixels."""

    __name__ = "width"
    columns = frozenset({"image"})
    bounds = (0.0, 1e6)
    signature = "width"

    def __call__(self, prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
        return [float(open_image(image).width) for image in columns["image"]]


@contextmanager
def served(reward: Reward | MixedReward, **options: Any) -> Iterator[str]:
    """The address of a server of ``reward`` in a thread."""
    mixture = (
        reward if isinstance(reward, MixedReward) else MixedReward({reward.__name__: (reward, 1.0)})
    )
    server = uvicorn.Server(
        uvicorn.Config(build_app(ServeConfig(**options), mixture), log_level="warning")
    )
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


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for ``condition``, 30 seconds at most."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "nothing happened in 30 seconds"
        time.sleep(0.01)


def client_of(url: str, **options: Any) -> RewardClient:
    return RewardClient(url, **{"timeout": 30.0, "attempts": 1} | options)


def mixture() -> MixedReward:
    cider = build("cider", df=DocumentFrequencies.from_texts(REFERENCES, eos=True))
    return MixedReward(
        {
            "cider": (cider, 1.0),
            "rouge": (build("rouge_l"), 0.5),
            "again": (build("repetition"), -0.1),
        }
    )


def status_of(
    url: str, path: str, content: bytes | None, **headers: str
) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url + path, content, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        content = error.read()
        return error.code, json.loads(content) if content[:1] == b"{" else {}


def test_scores_are_those_of_the_reward_to_the_last_bit() -> None:
    reward = mixture()
    with served(reward) as url:
        scores = client_of(url).score(CAPTIONS, references=REFERENCES)
        health = client_of(url).health()
    terms = reward.terms(None, CAPTIONS, references=REFERENCES)
    assert scores.terms == terms
    assert scores.total == reward.combine(terms)
    assert health["columns"] == ["references"]
    assert health["signature"] == reward.signature


def test_requests_that_arrive_meanwhile_share_a_call_and_a_bad_one_fails_alone() -> None:
    reward = Closed()
    with served(reward, window_ms=0.0) as url, ThreadPoolExecutor(4) as pool:
        first = pool.submit(client_of(url).score, ["a"])
        wait_until(lambda: reward.sizes)
        later = [
            pool.submit(client_of(url).score, captions)
            for captions in (["b"], ["c", "bad"], ["d", "e"])
        ]
        wait_until(lambda: client_of(url).health()["pending"] == 6)
        reward.gate.set()
        assert first.result().total == [1.0]
        assert [later[0].result().total, later[2].result().total] == [[1.0], [1.0, 1.0]]
        with pytest.raises(ServerError, match=r"422: .*closed"):
            later[1].result()
    assert reward.sizes[0] == 1, "not known to score rows alone: each request has its own call"
    assert sorted(reward.sizes) == [1, 1, 2, 2]


@pytest.mark.parametrize("max_batch", [6, 7])
def test_rows_of_known_rewards_share_calls_and_the_failing_row_is_named(
    monkeypatch: pytest.MonkeyPatch, max_batch: int
) -> None:
    sizes: list[int] = []
    reward = MixedReward({"rouge": (build("rouge_l"), 1.0)})
    score, gate = reward.terms, threading.Event()

    def terms(prompts: Any, completions: Sequence[Any], **columns: Any) -> dict[str, list[float]]:
        sizes.append(len(completions))
        assert gate.wait(30)
        return score(prompts, completions, **columns)

    monkeypatch.setattr(reward, "terms", terms)
    bad = [*REFERENCES, [], ["x"]]
    with served(reward, window_ms=0.0, max_batch=max_batch) as url, ThreadPoolExecutor(8) as pool:
        first = pool.submit(client_of(url).score, CAPTIONS[:1], references=REFERENCES[:1])
        wait_until(lambda: sizes)
        good = [
            pool.submit(client_of(url).score, CAPTIONS, references=REFERENCES) for _ in range(4)
        ]
        wait_until(lambda: client_of(url).health()["pending"] == 9)
        gate.set()
        expected = score(None, CAPTIONS, references=REFERENCES)["rouge"]
        assert first.result().total == expected[:1]
        assert [request.result().total for request in good] == [expected] * 4
        assert sizes == [1, 6, 2], "of two captions each, at most max_batch a call"
        with pytest.raises(ServerError, match=r"row 2: .*'rouge'"):
            client_of(url).score(["a", "b", "c", "d"], references=bad)


def test_of_two_requests_that_share_a_call_the_bad_one_fails_alone() -> None:
    async def outcomes() -> list[Any]:
        scorer = BatchingScorer(MixedReward({"rouge": (build("rouge_l"), 1.0)}), 8, 0.1, 100)
        running = asyncio.create_task(scorer.run())
        requests = (scorer.score(["a dog"], {"references": [texts]}) for texts in (["a dog"], []))
        results = await asyncio.gather(*requests, return_exceptions=True)
        running.cancel()
        return [*results, scorer.calls]

    good, bad, calls = asyncio.run(outcomes())
    assert good.total == [1.0]
    assert isinstance(bad, RewardError)
    assert calls == 3, "of both, then of each"


def test_captions_that_are_compared_with_those_of_their_call_share_none() -> None:
    reward = MixedReward(
        {
            "diversity": (
                build("diversity", df=DocumentFrequencies.from_texts(REFERENCES, eos=True)),
                1.0,
            )
        }
    )
    groups = [["a dog runs", "a dog", "a cat"], ["a dog runs", "a dog runs", "two dogs"]]
    with served(reward, window_ms=50.0) as url, ThreadPoolExecutor(2) as pool:
        requests = [
            pool.submit(client_of(url).score, captions, image_id=["1"] * 3) for captions in groups
        ]
        scores = [request.result().total for request in requests]
    assert scores == [reward(None, captions, image_id=["1"] * 3) for captions in groups]


def test_a_full_queue_answers_503_and_the_client_tries_again_but_never_makes_a_score_up() -> None:
    reward = Closed()
    with served(reward, max_pending=2, window_ms=0.0) as url, ThreadPoolExecutor(2) as pool:
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
    ("path", "content", "status", "field"),
    [
        ("/score", b"{", 400, None),
        ("/score", b"[" * 100_000, 400, None),
        ("/score", b"[]", 422, None),
        ("/score", b"{}", 422, "captions"),
        ("/score", b'{"captions": ["a"], "caption": []}', 422, "caption"),
        ("/score", b'{"captions": []}', 422, "captions"),
        ("/score", b'{"captions": ["a", 1]}', 422, "captions"),
        ("/score", b'{"captions": ["a"]}', 422, "references"),
        (
            "/score",
            b'{"captions": ["a"], "columns": {"references": ["x", "y"]}}',
            422,
            "references",
        ),
        ("/score", b'{"captions": ["a"], "columns": {"reference": [["x"]]}}', 422, "reference"),
        ("/score", b'{"captions": ["a"], "columns": {"references": [7]}}', 422, None),
        ("/score", b'{"captions": ["' + b"a" * 2**21 + b'"]}', 413, None),
        ("/score", rb'{"captions": ["a"], "\ud800": 1}', 422, "\ud800"),
        ("/score", rb'{"captions": ["a"], "columns": {"\ud800": [1]}}', 422, "\ud800"),
        (
            "/openrlhf",
            b'{"query": ["Say: a"], "prompts": ["Tell: "], "labels": ["{}"]}',
            422,
            "query",
        ),
        ("/openrlhf", b'{"query": ["a"], "prompts": [""], "labels": ["["]}', 422, "labels"),
        ("/llamafactory", b'{"model": "model"}', 422, "messages"),
    ],
)
def test_a_bad_request_is_refused_with_row_and_field(
    path: str, content: bytes, status: int, field: str | None
) -> None:
    with served(MixedReward({"rouge": (build("rouge_l"), 1.0)}), max_mb=1.0) as url:
        code, answer = status_of(url, path, content)
        assert (code, answer["field"]) == (status, field) if status != 422 or field else code == 422
        assert "error" in answer
        assert client_of(url).score(CAPTIONS, references=REFERENCES).total, "the server lives on"


def test_brackets_of_any_depth_are_refused() -> None:
    """Python reads some nestings that it then cannot show in a message."""
    with served(MixedReward({"rouge": (build("rouge_l"), 1.0)})) as url:
        for depth in range(900, 1020, 5):
            nested = b"[" * depth + b"]" * depth
            label = json.dumps('{"references": ' + nested.decode() + "}").encode()
            for path, content in (
                ("/score", b'{"captions": ' + nested + b"}"),
                ("/score", b'{"captions": ["a"], "columns": {"references": [' + nested + b"]}}"),
                ("/openrlhf", b'{"query": ["a"], "prompts": [""], "labels": [' + label + b"]}"),
            ):
                assert status_of(url, path, content)[0] in (400, 422)


def test_a_body_that_does_not_arrive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_caption.integrations.requests.BODY_SECONDS", 0.5)
    with (
        served(mixture()) as url,
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 30) as client,
    ):
        client.sendall(
            b'POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"captions": ['
        )
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")


def test_images_come_from_below_named_folders_or_as_bytes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    Image.new("RGB", (30, 20)).save(root / "inside.png")
    Image.new("RGB", (40, 20)).save(tmp_path / "outside.png")
    Image.new("RGB", (2000, 2000)).save(root / "large.png")
    (root / "text.png").write_text("no image")
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    (root / "loop.png").symlink_to("loop.png")
    os.mkfifo(root / "pipe.png")
    with served(Width(), images={"root": str(root)}, max_megapixels=1.0) as url:
        client = client_of(url)
        content = (root / "inside.png").read_bytes()
        assert client.score(["a", "b"], image=["root/inside.png", content]).total == [30.0, 30.0]
        large = io.BytesIO()
        Image.new("RGB", (2000, 2000)).save(large, "PNG")
        for image in (
            *(
                "root/missing.png",
                "root/../outside.png",
                "root/link.png",
                "root/large.png",
                "root/text.png",
            ),
            *(
                "root/pipe.png",
                "root/loop.png",
                "root",
                str(tmp_path / "outside.png"),
                "other/inside.png",
                "http://127.0.0.1:1/a.png",
            ),
            *(
                large.getvalue(),
                b"no image",
                7,
                None,
                ["root/inside.png"],
                {"base64": 1},
                {"base64": "!"},
            ),
        ):
            with pytest.raises(ServerError, match="422: row 1: image"):
                client.score(["a", "b"], image=["root/inside.png", image])


def test_images_of_a_request_are_decoded_one_at_a_time_and_a_damaged_one_is_named(
    tmp_path: Path,
) -> None:
    files = []
    for number in range(3):
        buffer = io.BytesIO()
        Image.effect_noise((30 + number, 20), 50).save(buffer, "PNG")
        files.append(buffer.getvalue())
    path = tmp_path / "same.png"
    path.write_bytes(files[0])
    assert image_identity(EncodedImage(files[0])) == image_identity(path), (
        "one entry of a cache for both"
    )
    with served(Width()) as url:
        assert client_of(url).score(["a", "b"], image=files[:2]).total == [30.0, 31.0]
        with pytest.raises(ServerError, match=r"422.*image"):
            client_of(url).score(["a", "b"], image=[files[0], files[2][:200]])


def test_the_reward_is_called_by_one_thread_also_to_find_the_row_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    reward = MixedReward({"rouge": (build("rouge_l"), 1.0)})
    score = reward.terms

    def terms(*arguments: Any, **columns: Any) -> dict[str, list[float]]:
        threads.append(threading.get_ident())
        return score(*arguments, **columns)

    monkeypatch.setattr(reward, "terms", terms)
    with served(reward) as url, pytest.raises(ServerError, match="row 1"):
        client_of(url).score(["a", "b"], references=[["a"], []])
    assert len(threads) > 2
    assert len(set(threads)) == 1


def test_a_redirect_is_an_error_and_gets_no_token() -> None:
    heard: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = client_of(f"http://127.0.0.1:{server.server_port}", token="secret")
        with pytest.raises(ServerError, match="302"):
            client.score(["a"])
        server.shutdown()
    assert heard == ["/score"]


def test_addresses_are_fetched_where_that_is_allowed(tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    with (
        served(Width(), allow_urls=True) as url,
        subprocess.Popen(
            [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as photos,
    ):
        assert photos.stdout is not None
        port = photos.stdout.readline().split("port ")[1].split()[0]
        try:
            assert client_of(url).score(["a"], image=[f"http://127.0.0.1:{port}/a.png"]).total == [
                30.0
            ]
            with pytest.raises(ServerError, match="422: row 0: image"):
                client_of(url).score(["a"], image=[f"http://127.0.0.1:{port}/b.png"])
        finally:
            photos.terminate()


def test_a_token_is_required_where_there_is_one_and_other_hosts_need_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RL_CAPTION_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="RL_CAPTION_TOKEN"):
        ServeConfig(host="0.0.0.0")
    body = json.dumps({"captions": ["a"], "columns": {"references": [["a"]]}}).encode()
    with served(MixedReward({"rouge": (build("rouge_l"), 1.0)})) as url:
        assert status_of(url, "/score", body, Host="attacker.example")[0] == 400
        monkeypatch.setenv("RL_CAPTION_TOKEN", "secret")
        ServeConfig(host="0.0.0.0")
        assert status_of(url, "/score", body)[0] == 401
        assert status_of(url, "/score", body, Authorization="Bearer other")[0] == 401
        assert client_of(url).score(["a"], references=[["a"]]).total == [1.0]


def test_cider_needs_document_frequencies() -> None:
    with pytest.raises(ConfigError, match=r"reward\.df"):
        build_served_reward(ServeConfig())


def test_adapters_score_as_their_frameworks_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = mixture()
    expected = reward(None, CAPTIONS, references=REFERENCES)
    unfinished = reward(None, CAPTIONS, references=REFERENCES, finished=[False, False])
    assert unfinished[0] != expected[0]
    terms = reward.terms(None, CAPTIONS, references=REFERENCES)
    with served(reward) as url:
        monkeypatch.setenv("RL_CAPTION_URL", url)
        row = asyncio.run(
            verl.compute_score(
                "coco",
                CAPTIONS[0],
                REFERENCES[0],
                extra_info={"index": 3, "split": "train"},
                url=url,
            )
        )
        assert row == {"score": expected[0], **{name: scores[0] for name, scores in terms.items()}}
        monkeypatch.setitem(
            sys.modules, VERL_MANAGER, SimpleNamespace(RewardManagerBase=VerlRewardManager)
        )
        from rl_caption.integrations.verl_manager import ServedRewardManager

        settings = {"custom_reward_function": {"path": None, "reward_kwargs": {"url": url}}}
        manager = ServedRewardManager(
            config=SimpleNamespace(reward=settings),
            tokenizer=Characters(),
            compute_score=None,
            reward_router_address=None,
        )
        items = [
            manager.run_single(verl_data(CAPTIONS[0], REFERENCES[0], finished))
            for finished in (True, False)
        ]
        finished_scores = [asyncio.run(item)["reward_score"] for item in items]
        assert finished_scores == [expected[0], unfinished[0]]
        labels = [json.dumps({"references": references}) for references in REFERENCES]
        inputs = [
            {"response": caption, "response_length": 3, "ground_truth": label}
            for caption, label in zip(CAPTIONS, labels, strict=True)
        ]
        assert [scores["overall"] for scores in easyr1.compute_score(inputs)] == expected
        queries = [
            f"<|im_start|>Describe.\n{caption}<|im_end|>\n<|endoftext|>" for caption in CAPTIONS
        ]
        prompts = ["<|im_start|>Describe.\n"] * 2
        assert openrlhf.reward_func(queries, prompts, labels)["rewards"] == expected
        assert (
            openrlhf.reward_func([prompts[0] + CAPTIONS[0]], prompts[:1], labels[:1])["rewards"]
            == unfinished[:1]
        )
        with pytest.raises(ValueError, match="<eot>"):
            openrlhf.reward_func([f"{prompts[0]}{CAPTIONS[0]}<eot>"], prompts[:1], labels[:1])
        body = {"query": queries, "prompts": prompts, "labels": labels}
        status, answer = status_of(url, "/openrlhf", json.dumps(body).encode())
        assert (status, answer["rewards"], answer["extra_logs"]) == (200, expected, terms)
        rewards = ServedReward(args=SimpleNamespace())
        assert (
            rewards(CAPTIONS, references=REFERENCES, solution=["", ""], trainer_state=None)
            == expected
        )
        reasons = {"finish_reason": ["stop", "length"], "is_truncated": [False, True]}
        assert rewards(CAPTIONS, references=REFERENCES, **reasons) == [expected[0], unfinished[1]]
        assert rewards(CAPTIONS, references=REFERENCES, finish_reason=[None, None]) == expected
    samples = [
        SimpleNamespace(
            id=str(row), image=f"{row}.jpg", references=REFERENCES[row], prediction=CAPTIONS[row]
        )
        for row in range(2)
    ]
    assert as_metric(reward)(samples) == {"0": expected[0], "1": expected[1]}
    with served(MixedReward({"again": (build("repetition"), 1.0)})) as url:
        texts = [
            "<|im_start|>user\na dog<|im_end|>\n<|im_start|>assistant\na dog a dog a dog<|im_end|>"
        ]
        address = "/llamafactory?after=%3C%7Cim_start%7C%3Eassistant%0A"
        body = json.dumps({"model": "model", "messages": texts}).encode()
        assert status_of(url, address, body)[1]["scores"] == [-0.6], "of the caption alone"
        for path, field in (
            ("/llamafactory", "after"),
            ("/llamafactory?after=ASSISTANT", "messages"),
        ):
            status, answer = status_of(url, path, body)
            assert (status, answer["field"]) == (422, field)


VERL_MANAGER = "verl.experimental.reward_loop.reward_manager.base"


class VerlRewardManager:
    """The base class of verl's reward managers."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None:
        self.config, self.tokenizer = config, tokenizer


class Characters:
    """A tokenizer of characters."""

    eos_token_id = 1

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return "".join(chr(number) for number in ids.tolist() if number > 1)


class VerlRow:
    """The row of a verl ``DataProto`` of one row, which also is the row."""

    def __init__(self, batch: dict[str, torch.Tensor], columns: dict[str, Any]) -> None:
        self.batch, self.non_tensor_batch = batch, columns

    def __getitem__(self, index: Any) -> "VerlRow":
        return self


def verl_data(caption: str, references: list[str], finished: bool) -> VerlRow:
    """A caption of verl's rollout, padded to 40 tokens, after a prompt of three."""
    ids = [ord(letter) for letter in caption] + [1] * finished
    padding = [0] * (40 - len(ids))
    batch = {
        "responses": torch.tensor(ids + padding),
        "attention_mask": torch.tensor([1] * (3 + len(ids)) + padding),
    }
    columns = {
        "data_source": "coco",
        "reward_model": {"ground_truth": references},
        "extra_info": {"index": 0},
    }
    return VerlRow(batch, columns)


LMMS_EVAL = """
import sys, types
from pycocoevalcap.eval import Bleu, Cider, Meteor, Rouge  # an import before changes nothing
sys.modules["lmms_eval"] = types.ModuleType("lmms_eval")
sys.modules["lmms_eval.cli"] = types.ModuleType("lmms_eval.cli")
dispatch = sys.modules["lmms_eval.cli.dispatch"] = types.ModuleType("lmms_eval.cli.dispatch")
def main():
    from pycocoevalcap.eval import Bleu, Cider, COCOEvalCap, Meteor, Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer
    scorers = [(Bleu(4), "Bleu_4"), (Meteor(), "METEOR"), (Rouge(), "ROUGE_L"), (Cider(), "CIDEr")]
    tokens = PTBTokenizer().tokenize({1: [{"caption": "A dog."}], 2: [{"caption": "Two cats"}]})
    print([scorer.compute_score(tokens, tokens)[0] for scorer, name in scorers[2:]], scorers[1][0].method())
dispatch.main = main
from rl_caption.integrations import lmms_eval
lmms_eval.main()
"""


def test_captioning_tasks_of_lmms_eval_score_without_java() -> None:
    """The imports and calls are those of ``lmms_eval/tasks/coco_cap/utils.py``."""
    environment = {"PATH": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.check_output([sys.executable, "-c", LMMS_EVAL], env=environment, text=True)
    assert output.strip() == "[np.float64(1.0), np.float64(5.0)] METEOR"


def test_the_client_and_the_adapters_need_only_the_standard_library() -> None:
    code = """
    import sys
    from rl_caption.integrations import capevalkit, client, easyr1, openrlhf, swift, verl
    print(sorted({"torch", "numpy", "PIL", "fastapi", "transformers"} & set(sys.modules)))
    """
    assert (
        subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True).strip()
        == "[]"
    )


SLOW_REWARD = """
import os, time
assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "16"
class Slow:
    __name__, columns, bounds, signature = "slow", frozenset(), (0.0, 1.0), "slow"
    def __call__(self, prompts, completions, **columns):
        time.sleep(2)
        return [0.5] * len(completions)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_ends_the_server_after_what_it_took(workers: int, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(SLOW_REWARD)
    (tmp_path / "mix.yaml").write_text("terms: {slow: {weight: 1.0, target: 'my_rewards:Slow'}}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "--reward", "mix.yaml", "--port", str(port), "--workers", str(workers)]
    command = [sys.executable, "-m", "rl_caption", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True) as server:
        url = f"http://127.0.0.1:{port}"
        try:
            client_of(url, attempts=30, backoff=0.5).health()
            with ThreadPoolExecutor(2) as pool:
                requests = [pool.submit(client_of(url).score, ["a", "b"]) for _ in range(2)]
                wait_until(lambda: any(client_of(url).health()["pending"] for _ in range(4)))
                time.sleep(0.5)  # until the other worker has its request, too
                server.send_signal(signal.SIGTERM)
                assert [request.result().total for request in requests] == [[0.5, 0.5]] * 2
            assert server.wait(30) == 0
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
