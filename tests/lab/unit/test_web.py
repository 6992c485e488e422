"""The page of captions side by side: what it answers over HTTP, what it refuses, and what is said before it listens."""

import base64
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from rewards.text.degeneration import Repetition
from rewards.text.rouge import RougeL
from rl_caption.captioners.config import Decoding
from rl_caption.cli.main import main as command
from rl_caption.config.schema import JudgeConfig
from rl_caption.data.plain_files import json_object
from rl_caption.lab.config import WebConfig
from rl_caption.lab.web import PageServer, is_own
from tests.captioners_for_tests import tiny_captioner, tiny_rows

NAMES = ["first", "<img src=x>"]


def png(size: tuple[int, int] = (16, 16), kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(NAMES):
        captioner = tiny_captioner(seed)
        captioner.save_pretrained(captioner.policy, place / name / "export" / "best")
    return [str(place / name / "export" / "best") for name in NAMES]


@pytest.fixture(scope="module")
def server(models: list[str]) -> Iterator[PageServer]:
    judges = {"ROUGE": JudgeConfig("rouge_l"), "repetition": JudgeConfig()}
    with PageServer(WebConfig(models, judges, port=0, max_mb=1, max_megapixels=0.01)) as found:
        found.load()
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def exchange(
    server: PageServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    own = {"Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    connection.request(
        method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), own
    )
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def photo(content: bytes, name: str = "red.png", **changes: Any) -> dict[str, Any]:
    asked = {"models": NAMES, "judges": ["ROUGE", "repetition"], "references": []}
    return {"name": name, "image": base64.b64encode(content).decode(), **asked, **changes}


def test_captions_and_scores_are_those_of_the_captioners_and_rewards(server: PageServer) -> None:
    row = tiny_rows(1)[0]
    buffer = io.BytesIO()
    row["image"].save(buffer, "PNG")
    expected = []
    for seed in range(2):
        captioner = tiny_captioner(seed)
        token_ids = captioner.generate(
            captioner.policy, captioner.preprocess([row]), server.models.decoding
        )
        expected += captioner.decode(token_ids.flatten(0, 1))
    references = ["a red circle", " ", "one circle"]
    for given, judges in ((references, {"ROUGE", "repetition"}), ([" "], {"repetition"})):
        status, answer = exchange(
            server, "POST", "/captions", photo(buffer.getvalue(), references=given)
        )
        captions = json.loads(answer)["captions"]
        assert status == 200
        assert [(found["model"], found["caption"]) for found in captions] == list(
            zip(NAMES, expected, strict=True)
        )
        assert all(found["scores"].keys() == judges for found in captions)
        assert [found["scores"]["repetition"] for found in captions] == Repetition()(None, expected)
        if given is references:
            rouge = RougeL()(None, expected, references=[["a red circle", "one circle"]] * 2)
            assert [found["scores"]["ROUGE"] for found in captions] == rouge
    status, answer = exchange(
        server, "POST", "/captions", photo(png(), models=NAMES[1:], judges=[])
    )
    assert [(found["model"], found["scores"]) for found in json.loads(answer)["captions"]] == [
        (NAMES[1], {})
    ]


def test_what_cannot_be_captioned_is_named(server: PageServer) -> None:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    for body, part in (
        (photo(png()[:-30], "cut.png"), "cut.png cannot be read"),
        (photo(script, "a.png"), "a.png cannot be read: "),
        (photo(png((101, 100)), "large.png"), "101 x 100"),
        (photo(png(), image="%%%", name="odd.png"), "odd.png cannot be read"),
        (photo(png(), models=[]), "models are []"),
        (photo(png(), judges=["cider"]), "judges are ['cider']"),
        (photo(png(), models=NAMES[:1] * 2000), "models are ['first', 'first'"),
        (photo(png(), judges=["ROUGE"] * 2000), "judges are ['ROUGE', 'ROUGE'"),
        (photo(png(), references="a"), "'references'"),
        (b"{", "not JSON"),
        (b'{"name": ' + b"[" * 100_000, "the request"),
        (b'{"name": "a", "name": "b"}', "name"),
        (photo(png(), name="\ud800" * 100, image="%%%"), "cannot be read"),
    ):
        status, answer = exchange(server, "POST", "/captions", body)
        assert (status, part in json.loads(answer)["error"]) == (422, True), answer


def test_requests_that_are_not_the_page_s_are_refused(server: PageServer) -> None:
    host = f"localhost:{server.server_port}"
    assert (
        exchange(server, "POST", "/captions", photo(png()), Host=host, Origin=f"http://{host}")[0]
        == 200
    )
    for status, method, path, headers in (
        (403, "GET", "/", {"Host": "evil.example"}),
        (403, "POST", "/captions", {"Host": "evil.example"}),
        (403, "POST", "/captions", {"Origin": "http://evil.example"}),
        (403, "POST", "/captions", {"Origin": "null"}),
        (404, "GET", "/etc/passwd", {}),
        (404, "POST", "/captions", {"Content_Type": "text/plain"}),
        (411, "POST", "/captions", {"Content_Length": "-1"}),
        (413, "POST", "/captions", {"Content_Length": "9" * 10}),
        (413, "POST", "/captions", {"Content_Length": "0" * 20 + "9" * 10}),
        (413, "POST", "/captions", {"Content_Length": "9" * 5000}),
        (411, "POST", "/captions", {"Content_Length": "²"}),
    ):
        assert exchange(server, method, path, **headers)[0] == status, (method, path, headers)


def test_photos_are_decoded_one_at_a_time_and_at_most_one_more_is_read(
    server: PageServer, monkeypatch
) -> None:
    """Eight small files of one colour would take gigabytes together, and so would the bodies of many large ones."""
    held, most, entered = {"bodies": 0, "photos": 0}, {"bodies": 0, "photos": 0}, threading.Lock()

    def change(name: str, by: int) -> None:
        with entered:
            held[name] += by
            most[name] = max(most[name], held[name])

    def body(*arguments: Any) -> Any:
        change("bodies", 1)
        return json_object(*arguments)

    def slow_photo(*arguments: Any) -> Image.Image:
        change("photos", 1)
        time.sleep(0.05)
        change("photos", -1)
        change("bodies", -1)
        return Image.new("RGB", (16, 16))

    monkeypatch.setattr("rl_caption.lab.web.json_object", body)
    monkeypatch.setattr("rl_caption.lab.web.read_photo", slow_photo)
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda _: exchange(server, "POST", "/captions", photo(png())), range(8))
        )
    assert [status for status, _ in answers] == [200] * 8
    assert most["photos"] == 1
    assert most["bodies"] <= 2


def test_a_request_has_little_besides_its_photo_and_arrives_in_time(
    server: PageServer, monkeypatch
) -> None:
    """Megabytes of references would keep a judge busy for minutes; two bodies byte by byte would block the page."""
    for changes in (
        {"references": ["a dog"] * 50_000},
        {"name": "a" * 2**17},
        {"models": NAMES * 5_000},
    ):
        assert exchange(server, "POST", "/captions", photo(png(), **changes))[0] == 413, (
            changes.keys()
        )
    monkeypatch.setattr("rl_caption.lab.web.SECONDS", 0.2)
    body = json.dumps(photo(png())).encode()
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        head = ["POST /captions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        connection.sendall(
            "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body[:1]
        )
        time.sleep(0.3)
        connection.sendall(body[1:2])
        assert connection.recv(2**12).split()[1] == b"408"
    assert exchange(server, "POST", "/captions", photo(png()))[0] == 200


def test_the_host_is_an_address_or_a_name_of_this_machine() -> None:
    for netloc in ("127.0.0.1:80", "[::1]:80", "192.168.1.9", "LocalHost:9", "my-server:80"):
        assert is_own(netloc, "my-server"), netloc
    for netloc in (
        "my-server.evil.example",
        "127.0.0.1.evil.example:80",
        "user@evil.example",
        "[::1",
        "",
    ):
        assert not is_own(netloc, "my-server"), netloc


def test_the_page_loads_nothing_from_elsewhere_and_names_are_text(
    server: PageServer, models: list[str]
) -> None:
    status, page = exchange(server, "GET", "/")
    assert status == 200
    assert page.count('type="checkbox"') == 4
    assert models[0] in page
    assert "&lt;img src=x&gt;" in page
    assert "<img src=x>" not in page
    assert "http://" not in page
    assert "https://" not in page


def test_what_is_wrong_is_said_before_it_listens(server, models, tmp_path, capsys):
    regions = tiny_captioner(input_kind="regions")
    regions.save_pretrained(regions.policy, tmp_path / "regions")
    one = ["--port=0", "--models", models[0]]
    for arguments, part in (
        ([], "models is empty"),
        ([*one, models[0]], "models is"),
        (["--port=0", "--models", str(tmp_path / "regions")], "region features"),
        ([*one, "--judges.cider.target", "null"], "judges.cider needs document frequencies"),
        ([*one, "--judges.x.target", "consensus"], "judges.x needs image_id"),
        ([*one, "--decode.num_samples", "3"], "decode gives 3 captions an image"),
        (["--models", models[0], "--port", str(server.server_port)], "port 0 takes a free one"),
    ):
        with pytest.raises(SystemExit) as ended:
            command(["web", *arguments])
        assert ended.value.code == 1
        assert part in capsys.readouterr().err
    assert WebConfig(decode=Decoding(num_samples=1)).decode.captions_per_image == 1
