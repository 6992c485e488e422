"""Models, runs and checkpoints that somebody else made to run code, to fetch or to read other files: refused by name.

Each attack would leave a file, ``ran``; none may, whichever program reads the folder.
"""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.dual import DualConfig, PretrainedDual
from rewards.clip.grammar_head import GrammarConfig, GrammarModel
from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.text.grammar import Grammar
from rewards.text.icc import Icc
from rewards.text.perplexity import Perplexity
from rewards.trust import SHIPPED, trust
from rl_caption.captioners.loading import load_captioner
from rl_caption.cli.main import main
from rl_caption.lab.recaption import file_name
from rl_caption.lab.recaptioners import VisionLanguageRecaptioner
from rl_caption.reward_models.students import build_tower
from rl_caption.runtime.errors import EXPECTED
from tests.captioners_for_tests import tiny_captioner, tiny_rows
from tests.clip_for_tests import ARCHITECTURE, tiny_checkpoint
from tests.encoders_for_tests import save_text_encoder, save_vit
from tests.hf_models_for_tests import bert_tokenizer, save_model, tiny_gpt2, tiny_regressor
from tests.vlm_for_tests import tiny_qwen2_vl

pytestmark = pytest.mark.slow

IMAGE = "tests.encoders_for_tests:TinyImageEncoder"
RAN = Path("ran")
PAYLOAD = "open('ran', 'w').close()\ndef __getattr__(name):\n    return lambda *a, **k: open('ran', 'w').close()\n"
SCENES = {"num_train": 4, "num_val": 4, "num_test": 4, "num_unseen": 0, "image_size": 32}
ADVICE = re.compile("weights_only|trust_remote_code|allow_pickle|safe_globals")
SMALL = LCLIPConfig(
    embed_dim=8, image_size=16, patch_size=8, image_width=8, image_heads=2, image_blocks=1, vocab_size=16,
    context_length=8, text_width=8, text_heads=2, text_blocks=1, embedding_rank=4, image_encoder=IMAGE,
)  # fmt: skip
NAMES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("os:system", {"command": "touch ran"}),
    ("payload:Encoder", {}),  # a file in the working directory
    ("payload", {}),
    (":system", {}),
    ("os:", {}),
    ("subprocess:run", {"args": ["touch", "ran"]}),
    ("builtins:exec", {"source": "open('ran', 'w').close()"}),
    ("runpy:run_path", {"path_name": "payload.py"}),
    ("importlib:import_module", {"name": "payload"}),
    ("rewards.trust:import_outside", {"module": "payload"}),
    ("rl_caption.runtime.options:load_target", {"name": "payload:X", "key": ""}),
    ("rl_caption.__main__:main", {}),
    ("timm:create_model", {"model_name": "resnet10t"}),
    ("timm:local-dir:payload", {}),
    ("timm:hf-hub:payload/model", {}),
    ("open_clip:local-dir:payload", {}),
    ("open_clip:hf-hub:payload/model", {}),
    ("open_clip:../payload", {}),
    ("transformers:payload/model", {}),
    ("transformers:.", {}),
    ("open_clip:RN50", {"vision_cfg": {"timm_model_name": "hf-hub:payload/model"}}),
    (
        "open_clip:RN50",
        {"vision_cfg": {"timm_model_name": "resnet10t", "timm_model_pretrained": True}},
    ),
    ("open_clip:RN50", {"vision_cfg": ["x"]}),
)
"""Names and arguments in a received ``config.json``."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of each kind whose configuration names a class, as the package writes them."""
    folder = tmp_path_factory.mktemp("whole")
    text = save_text_encoder(folder / "bert")
    PretrainedDual(DualConfig(IMAGE, text, embed_dim=8, hidden=8)).save_pretrained(folder / "dual")
    GrammarModel(GrammarConfig(text, hidden=8)).save_pretrained(folder / "grammar")
    LCLIP(SMALL).save_pretrained(folder / "student")
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, folder / "captioner")
    return folder


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with a module in it; nothing may run it, fetch anything, or ask at the terminal."""
    for name in ("payload.py", "peft_payload.py"):
        (tmp_path / name).write_text(PAYLOAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked at the terminal"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield tmp_path
    assert not RAN.exists(), "the attack ran"


def copied(whole: Path, kind: str, folder: Path, **changes: Any) -> Path:
    """A copy of a model with a changed ``config.json``."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole / kind, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def refusal(load: Callable[[], Any], *parts: str) -> str:
    """The message of the one error, which names ``parts`` and gives no advice to run a file after all."""
    with pytest.raises((ValueError, *EXPECTED)) as caught:
        load()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert not ADVICE.search(message), message
    return message


PLACES: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "image of a dual": ("dual", "image", lambda folder: load_frozen_encoder(str(folder))),
    "text of a dual": ("dual", "text", lambda folder: load_frozen_encoder(str(folder))),
    "text of a grammar head": ("grammar", "text", lambda folder: Grammar(str(folder))),
    "image_encoder of an L-CLIP": (
        "student",
        "image_encoder",
        lambda folder: load_frozen_encoder(str(folder)),
    ),
}


@pytest.mark.parametrize(
    ("name", "kwargs"), NAMES, ids=[f"{name} {kwargs}"[:60] for name, kwargs in NAMES]
)
@pytest.mark.parametrize("place", PLACES)
def test_a_saved_encoder_runs_what_the_package_brings(place, name, kwargs, whole, received):
    kind, key, load = PLACES[place]
    trust([IMAGE])  # that one class, so that only ``name`` is left to refuse
    folder = copied(whole, kind, received / "model", **{key: name, f"{key}_kwargs": kwargs})
    shutil.rmtree(folder / f"{key.removesuffix('_encoder')}_encoder", ignore_errors=True)
    assert str(folder) in refusal(lambda: load(folder))


@pytest.mark.parametrize("name", [name for name, _ in NAMES if ":" in name])
def test_a_captioner_runs_what_the_package_brings(name, whole, received):
    folder = copied(whole, "captioner", received / "model", model_type=name)
    assert str(folder / "config.json") in refusal(lambda: load_captioner(folder))


def test_random_names_are_refused_before_any_import(
    whole: Path, received: Path, monkeypatch
) -> None:
    """Seeded: the modules of the standard library and of the environment, with all of their names."""
    monkeypatch.setattr(
        "rewards.trust.importlib.import_module", lambda name: pytest.fail(f"imported {name}")
    )
    draw = random.Random(0)
    modules = [
        "os",
        "sys",
        "shutil",
        "subprocess",
        "torch",
        "rewards",
        "rl_caption.cli.main",
        "payload",
        "..",
        "é",
        "",
    ]
    for _ in range(60):
        name = ":".join(
            draw.choice([*modules, "system", "load", "Popen", "a b", "\n"])
            for _ in range(draw.randint(2, 4))
        )
        kind, key, load = PLACES[draw.choice(list(PLACES))]
        if name in SHIPPED:
            continue
        trust([IMAGE])
        folder = copied(whole, kind, received / "model", **{key: name})
        shutil.rmtree(folder / "text_encoder", ignore_errors=True)
        assert str(folder) in refusal(lambda load=load, folder=folder: load(folder))


def test_shipped_classes_read_no_other_folder(whole: Path, received: Path) -> None:
    kwargs = {"model": str(whole / "captioner")}
    changes = {
        "image": "rl_caption.captioners.image_encoder:CaptionerImage",
        "image_kwargs": kwargs,
    }
    folder = copied(whole, "dual", received / "model", **changes)
    assert str(folder) in refusal(lambda: load_frozen_encoder(str(folder)))


def test_the_user_s_word_is_enough(whole: Path, received: Path) -> None:
    refusal(lambda: load_frozen_encoder(str(whole / "dual")), IMAGE, str(whole / "dual"))
    trust([IMAGE])
    assert load_frozen_encoder(str(whole / "dual")).context_length
    assert load_frozen_encoder(str(whole / "student")).context_length
    for name in ("tests", "tests.encoders_for_tests:", ":X"):
        with pytest.raises(ValueError, match="trust"):
            trust([name])


def test_the_tower_of_a_stage_names_no_class(whole: Path, received: Path) -> None:
    folder = copied(
        whole, "student", received / "model", model_type="l_clip_image", image_encoder="os:system"
    )
    assert str(folder) in refusal(lambda: build_tower("image", str(folder), {}, 8))


# --- programs ---------------------------------------------------------------------------------------------------------


def programs(model: str, dual: str, photo: str) -> dict[str, list[str]]:
    """Every program that loads a captioner or an encoder, on a received one."""
    data = ["--data.format", "scenes", "--data.kwargs", json.dumps(SCENES)]
    run = ["--run.dir", "run", "--train.max_steps", "1", "--train.batch_size", "2"]
    clip = json.dumps({"backbone": dual})
    rerank = ["--rerank", "clipscore", "--rerank_kwargs", clip]
    judge = ["--judges.CLIP.target", "clipscore", "--judges.CLIP.kwargs", clip]
    term = ["--reward.terms", json.dumps({"clipscore": {"kwargs": {"backbone": dual}}})]
    return {
        "caption": ["caption", "--model", model, photo],
        "caption, reranked": ["caption", "--model", model, "--num_samples", "2", *rerank, photo],
        "average": ["average", "--models", model, f"{model}/", "--out", "mean"],
        "evaluate": [
            "evaluate",
            "--model",
            model,
            *data,
            "--metrics",
            "[cider]",
            "--tokenizer",
            "python",
        ],
        "evaluate, judge": [
            "evaluate",
            "--predictions",
            "captions.json",
            *data,
            *judge,
            "--tokenizer",
            "python",
        ],
        "evaluate, retrieval": [
            "evaluate",
            "--predictions",
            "captions.json",
            *data,
            "--retrieval.backbone",
            dual,
        ],
        "score": [
            "score",
            "--reward",
            "clipscore",
            "--kwargs",
            clip,
            "--captions",
            "photo.json",
            "--images",
            ".",
        ],
        "web": ["web", "--models", model, "--port", "0"],
        "web, judge": ["web", "--models", "whole", "--port", "0", *judge],
        "retrieval": ["retrieval", "--models.a.backbone", dual, *data],
        "judge": ["judge", "--set", "scenes", "--scenes.captioner", model],
        "judge, metric": ["judge", "--set", "scenes", *judge],
        "curate": ["curate", "--data", "rows.jsonl", "--scores.clipscore.kwargs", clip],
        "recaption": ["recaption", *data, "--recaptioner.kwargs", json.dumps({"model": model})],
        "concreteness": [
            *("concreteness", "--captions", "rows.txt", "--scorers.VBA.target"),
            *("rl_caption.lab.visual_bottleneck:VisualBottleneck", "--scorers.VBA.kwargs"),
            json.dumps({"captioner": model, "similarity": "rouge_l"}),
        ],
        "xe": ["xe", "--model.init", model, *data, *run],
        "scst": ["scst", "--model.init", model, *data, *run],
        "scst, reward": [
            "scst",
            "--model.init",
            "whole",
            "--rollout.max_new_tokens",
            "8",
            *data,
            *run,
            *term,
        ],
        "reward_model": ["reward_model", "--model.init", dual, *data, *run],
        "doctor": ["doctor", "--config", "scst.yaml"],
        "prepare_features": [
            *("prepare_features", "--data", ".", "--out", "features", "--encoder"),
            *(
                "rl_caption.captioners.image_encoder:CaptionerImage",
                "--kwargs",
                json.dumps({"model": model}),
            ),
        ],
    }


@pytest.mark.parametrize("program", programs("", "", ""))
def test_no_program_runs_a_received_model(
    program: str, whole: Path, received: Path, capsys
) -> None:
    tiny_rows(1)[0]["image"].save(received / "photo.png")
    captions = [{"image_id": f"test-{index:06d}", "caption": "a red circle"} for index in range(4)]
    (received / "captions.json").write_text(json.dumps(captions))
    (received / "photo.json").write_text('[{"image_id": "photo", "caption": "a circle"}]')
    (received / "rows.jsonl").write_text(
        '{"image_id": "1", "image": "photo.png", "references": ["a circle"]}\n'
    )
    (received / "rows.txt").write_text("a red circle\n")
    shutil.copytree(whole / "captioner", received / "whole")
    model = str(copied(whole, "captioner", received / "model", model_type="payload:Captioner"))
    dual = str(copied(whole, "dual", received / "encoder", image="payload:Encoder"))
    data = {"format": "scenes", "kwargs": SCENES}
    scst = {"model": {"init": model}, "data": data, "reward": {"terms": {"cider": {}}}}
    (received / "scst.yaml").write_text(yaml.safe_dump(scst))
    code: Any = None
    try:
        code = main(programs(model, dual, str(received / "photo.png"))[program])
    except SystemExit as ended:
        code = ended.code
    said = "".join(capsys.readouterr())
    assert code in (1, None) or program == "doctor", said
    assert "payload:" in said or program == "prepare_features", said
    assert "Traceback" not in said


def test_the_report_of_a_received_run_builds_no_class(received: Path, start: Path, capsys) -> None:
    run = received / "run"
    shutil.copytree(start.parents[1], run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    for target, kwargs in (("os:system", {"command": "touch ran"}), ("payload:Data", {})):
        config["data"] |= {"target": target, "kwargs": kwargs}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        assert main(["report", str(run)]) == 0
        assert target in (run / "report.html").read_text(), "the page says why it has no pictures"
        assert main(["share", str(run), "--out", str(received / target.replace(":", "_"))]) == 0


# --- models of other libraries ----------------------------------------------------------------------------------------

PARTS = (
    "Config",
    "Model",
    "ModelForCausalLM",
    "ModelForImageTextToText",
    "ModelForSequenceClassification",
)
AUTO_MAP: dict[str, Any] = {
    f"Auto{part}": "payload.Part" for part in (*PARTS, "ImageProcessor", "Processor")
}
AUTO_MAP["AutoTokenizer"] = ["payload.Part", "payload.Part"]
LIBRARIES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "blip": (lambda folder: save_model("blip", folder), load_captioner),
    "perplexity": (tiny_gpt2, lambda folder: Perplexity(str(folder))),
    "icc": (tiny_regressor, lambda folder: Icc(str(folder))),
    "vision_language": (tiny_qwen2_vl, lambda folder: VisionLanguageRecaptioner(str(folder))),
    "text encoder": (
        save_text_encoder,
        lambda folder: PretrainedDual(DualConfig(IMAGE, f"transformers:{folder}")),
    ),
    "image encoder": (
        save_vit,
        lambda folder: PretrainedDual(
            DualConfig(f"transformers:{folder}", f"transformers:{folder.parent / 'bert'}")
        ),
    ),
}


@pytest.mark.parametrize("attack", ["auto_map", "unknown type", "adapters", "kernel"])
@pytest.mark.parametrize("kind", LIBRARIES)
def test_code_beside_a_model_of_transformers_is_not_run(
    kind: str, attack: str, received: Path
) -> None:
    """With ``auto_map`` alone the library's own classes are used; an unknown type has none."""
    save, load = LIBRARIES[kind]
    folder = received / "model"
    save_text_encoder(received / "bert")
    save(folder)
    (folder / "payload.py").write_text(PAYLOAD)
    if attack == "adapters":
        adapter = {
            "peft_type": "LORA",
            "base_model_name_or_path": "payload/model",
            "megatron_core": "payload",
        }
        (folder / "adapter_config.json").write_text(
            json.dumps(adapter | {"megatron_config": {"a": 1}})
        )
    for file in folder.glob("*config.json"):
        values = json.loads(file.read_text())
        if attack in ("auto_map", "unknown type"):
            values["auto_map"] = AUTO_MAP
        if attack == "unknown type":
            for key in ("model_type", "tokenizer_class", "image_processor_type", "processor_class"):
                if key in values:
                    values[key] = "payload"
        if attack == "kernel":
            values |= {
                "attn_implementation": "payload/kernel",
                "use_kernels": True,
                "custom_generate": "payload/model",
            }
        file.write_text(json.dumps(values))
    if attack in ("adapters", "unknown type"):
        assert str(folder) in refusal(lambda: load(folder))
        return
    with suppress(ValueError, *EXPECTED):
        load(folder)
    assert not RAN.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"text_cfg": {"tokenizer_kwargs": {"trust_remote_code": True}}},
        {"text_cfg": {"tokenizer_kwargs": {"tokenizer_file": "/etc/passwd"}}},
        {"text_cfg": {"hf_model_name": "payload/model"}},
        {"vision_cfg": {"timm_model_name": "hf-hub:payload/model"}},
        {"vision_cfg": {"timm_model_name": "local-dir:payload"}},
    ],
)
def test_an_open_clip_model_names_no_code(change: dict[str, Any], received: Path) -> None:
    folder = received / "model"
    bert_tokenizer().save_pretrained(folder)
    tokenizer = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "payload", "auto_map": AUTO_MAP}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | own))
    (folder / "payload.py").write_text(PAYLOAD)
    vision = {"layers": 1, "width": 16, "head_width": 8, "image_size": 32, "patch_size": 16}
    text = {
        "context_length": 8,
        "vocab_size": 64,
        "width": 16,
        "heads": 2,
        "layers": 1,
        "hf_tokenizer_name": "x",
    }
    config = {"embed_dim": 16, "custom_text": True, "vision_cfg": vision, "text_cfg": text}
    for section, values in change.items():
        config[section] |= values  # type: ignore[operator]
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": {}})
    )
    assert str(folder) in refusal(lambda: load_frozen_encoder(str(folder)))


class WritesWhenRead(nn.Module):
    """As TorchScript it runs this when it is loaded, before any check of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, bool]:
        return (self.weight, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        self.weight = state[0]
        self.training = state[1]
        torch.save(state[0], "ran")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def test_an_archive_of_torchscript_runs_nothing(received: Path) -> None:
    torch.jit.script(WritesWhenRead()).save("clip.pt")
    RAN.unlink(missing_ok=True)
    assert "clip.pt" in refusal(lambda: load_frozen_encoder(ARCHITECTURE, "clip.pt"))


def test_a_pickled_checkpoint_is_refused_without_advice(received: Path) -> None:
    torch.save({"state_dict": {"a": Path("x")}}, "clip.pt")
    refusal(lambda: load_frozen_encoder(ARCHITECTURE, "clip.pt"), "clip.pt", "PosixPath")
    assert load_frozen_encoder(ARCHITECTURE, tiny_checkpoint(received)).context_length


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["..", ".", "../../out", "/tmp/out", "a/b", "train"])
def test_a_split_is_a_name_and_no_place(split: str, received: Path) -> None:
    out = received / "below" / "out"
    assert (out / "images" / file_name(split)).resolve().parent == (out / "images").resolve()
    assert file_name("train") == "train"
