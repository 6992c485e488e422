"""Validation of a captioner during training: greedy captions of the validation split, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable

from rl_caption.captioners.base import Captioner, Decoding
from rl_caption.data.files import write_json
from rl_caption.evaluation import validation_cider
from rl_caption.inference import caption_rows
from rl_caption.stage import Stage
from rl_caption.types import Validation


def caption_validator(stage: Stage, captioner: Captioner, max_new_tokens: int) -> Callable[[int], Validation]:
    """A function of the step that captions the validation images greedily; called by every process.

    It writes the captions to ``eval/step-N/predictions.json`` in COCO result format.
    """
    references = {row["image_id"]: row["references"] for row in stage.val_rows}
    decoding = Decoding(max_new_tokens=max_new_tokens)
    batch_size = stage.config.eval.batch_size

    def validate(step: int) -> Validation:
        captions = caption_rows(captioner, captioner.policy, stage.val_rows, decoding, batch_size, stage.accelerator)
        if stage.accelerator.is_main_process:
            records = [{"image_id": image, "caption": caption} for image, caption in captions.items()]
            write_json(stage.folder / "eval" / f"step-{step:08d}" / "predictions.json", records)
        words = [len(caption.split()) for caption in captions.values()]
        return Validation({"val/cider": validation_cider(captions, references), "val/length": sum(words) / len(words)})

    return validate
