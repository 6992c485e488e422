"""The page of captions side by side in a real browser: photos are captioned, a broken one is named, nothing is HTML."""

import base64
import hashlib
import re
import subprocess
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest

from rl_caption.config.schema import JudgeConfig
from rl_caption.lab.config import WebConfig
from rl_caption.lab.web import PageServer
from tests.captioners_for_tests import tiny_captioner
from tests.core.integration.test_report_browser import BROWSER, NAMES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is on PATH"
    ),
]

PROBE = """
const draw = () => new Promise((resolve) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 32, height: 32 });
  canvas.getContext("2d").fillRect(0, 0, 16, 16);
  canvas.toBlob(resolve, "image/png");
});
const settled = (text) => new Promise((resolve) => {
  const look = () => document.getElementById("count").textContent.includes(text) ? resolve() : setTimeout(look, 50);
  look();
});
const put = (files) => {
  const given = new DataTransfer();
  for (const file of files) given.items.add(file);
  document.dispatchEvent(Object.assign(new Event("drop", { cancelable: true }), { dataTransfer: given }));
};
(async () => {
  const blob = await draw();
  put([new File([blob], "<img src=x>.png"), new File(["no image"], "broken.jpg"), new File([blob], "third.png")]);
  await settled("2 of 2 photos done");
  document.querySelector("textarea").value = "a red circle\\none circle";
  document.querySelector("article button").click();
  await settled("1 of 2");
  await settled("2 of 2");
  document.querySelector("[name=models]").click();
  await settled("0 of 2");
  await settled("2 of 2");
  console.log("PROBED " + encodeURIComponent(document.body.innerHTML));
})();
"""


def test_photos_are_captioned_in_a_browser(tmp_path: Path) -> None:
    for seed, name in enumerate(("before", "after")):
        captioner = tiny_captioner(seed)
        captioner.save_pretrained(captioner.policy, tmp_path / name)
    judges = {"ROUGE": JudgeConfig("rouge_l"), "repetition": JudgeConfig()}
    config = WebConfig(
        [str(tmp_path / "before"), str(tmp_path / "after")], judges, port=0, max_images=2
    )
    with PageServer(config) as server:
        server.load()
        # The page's own policy stays, and allows one more script.
        digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
        text = server.page.decode().replace("script-src", f"script-src 'sha256-{digest}'")
        server.page = text.replace("</body>", f"<script>{PROBE}</script></body>").encode()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [
            *(
                str(BROWSER),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
            ),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"),
            *("--remote-debugging-port=0", server.url),
        ]
        # In real time, until the probe prints the page: a budget of virtual time runs out on a busy machine.
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as browser:
            assert browser.stderr is not None
            guard = threading.Timer(300, browser.kill)
            guard.start()
            console = []
            for line in browser.stderr:
                console += [line] if "CONSOLE" in line and "422" not in line else []
                if "PROBED" in line:
                    break
            guard.cancel()
            browser.kill()
        server.shutdown()
    assert len(console) == 1, console
    page = unquote(console[0].split("PROBED ")[1].split('"')[0])
    assert "2 of 2 photos done. 1 of them could not be captioned." in page
    assert "1 more were left out: at most 2 at a time." in page
    first, second, blueprint = re.findall("<article>(.*?)</article>", page, re.DOTALL)
    assert re.findall("<dt>(.*?)</dt>", first) == ["after"], "the other captioner was switched off"
    assert re.findall(r"(\w+) <b>[\d.−]+</b>", first) == ["ROUGE", "repetition"]
    assert "&lt;img src=x&gt;.png</h4>" in first
    assert '<img src="x"' not in page
    assert "broken.jpg cannot be read" in second
    assert "<dl></dl>" in blueprint
