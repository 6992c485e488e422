"""OpenRLHF: ``SingleTurnAgentExecutor`` scores rows with an image by the file of our adapter."""

# /// script
# dependencies = [
#     "transformers==5.15.0", "torch>=2.11,<2.14", "torchvision", "aiohttp", "pillow", "sympy",
#     "pylatexenc", "numpy", "accelerate", "datasets", "tqdm", "deepspeed==0.19.6", "ray[default]==2.55.0",
# ]
# [tool.engine]
# alone = ["openrlhf==0.11.2"]
# serve = true
# vlm = true
# ///

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoProcessor, PreTrainedTokenizerFast

import rl_caption.integrations.openrlhf as adapter
from tests.engines.report import FOLDER, cases, scored


class Engine:
    """Generates a caption, in place of vLLM."""

    def __init__(self, ids: list[int], finish_reason: str) -> None:
        self.ids, self.finish_reason = ids, finish_reason

    async def generate(self, *_: Any, **__: Any) -> Any:
        """Output of a request, the given token ids."""
        output = SimpleNamespace(
            token_ids=self.ids, finish_reason=self.finish_reason, logprobs=None
        )
        return SimpleNamespace(outputs=[output])


def byte_processor() -> Any:
    """Processor of the tiny Qwen2-VL with a tokenizer of bytes, which keeps line
    breaks.
    """
    words = AutoProcessor.from_pretrained(FOLDER / "qwen2_vl")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = words.tokenizer.all_special_tokens
    trainer = trainers.BpeTrainer(special_tokens=specials, initial_alphabet=alphabet)
    backend.train_from_iterator(["describe this image"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=words.tokenizer.pad_token,
        eos_token=words.tokenizer.eos_token,
        additional_special_tokens=specials,
    )
    parts = (words.image_processor, tokenizer, words.video_processor)
    return type(words)(*parts, chat_template=words.chat_template)


async def main() -> None:
    """Score each case with and without its image in the prompt, finished and cut off."""
    processor = byte_processor()
    tokenizer = processor.tokenizer
    executor = SingleTurnAgentExecutor(adapter.__file__)
    parameters = SimpleNamespace(max_tokens=16, logprobs=None)
    for pictured in (True, False):
        captions, rewards, rows, finished = [], [], [], []
        for row in cases():
            content = [{"type": "text", "text": "describe this image"}]
            if pictured:
                content = [{"type": "image"}, *content]
            prompt = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
            columns = {
                "image": f"photos/{Path(row['image']).name}",
                "references": row["references"],
            }
            ids = tokenizer(row["caption"], add_special_tokens=False)["input_ids"]
            for ended in (True, False):
                engine = Engine(
                    ids + [tokenizer.eos_token_id] * ended,
                    "stop" if ended else "length",
                )
                output = await executor.execute(
                    prompt,
                    json.dumps(columns),
                    parameters,
                    512,
                    processor if pictured else tokenizer,
                    engine,
                    images=[row["image"]] if pictured else None,
                )
                rewards.append(output["reward"][0])
                captions.append(tokenizer.decode(ids))
                rows.append(row)
                finished.append(ended)
        scored(
            f"`SingleTurnAgentExecutor`, rows {'with' if pictured else 'without'} an image in the "
            f"prompt",
            captions,
            rewards,
            references=[row["references"] for row in rows],
            image=[row["image"] for row in rows],
            finished=finished,
        )


if __name__ == "__main__":
    asyncio.run(main())
