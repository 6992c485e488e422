"""Validation of a captioner during training: captions of the validation split, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from rewards.base import RewardError
from rl_caption.captioners.base import Captioner, Decoding
from rl_caption.config import CaptionEvalConfig
from rl_caption.data.files import write_json
from rl_caption.evaluation import validation_cider
from rl_caption.hacking.monitor import HackingMonitor
from rl_caption.inference import decode_rows
from rl_caption.stage import Stage
from rl_caption.types import Validation


def caption_validator(
    stage: Stage, captioner: Captioner, max_new_tokens: int, monitor: HackingMonitor | None = None
) -> Callable[[int, Mapping[str, float]], Validation]:
    """A function of the step, and of what it logged, that captions the validation images as ``config.eval`` says.

    Every process calls it.
    It writes the captions to ``eval/step-N/predictions.json`` in COCO result format and, with a ``monitor``, the scores
    of every image by the judges to ``eval/step-N/judges.json``.
    """
    references = {row["image_id"]: row["references"] for row in stage.val_rows}
    settings = stage.config.eval
    assert isinstance(settings, CaptionEvalConfig), "of a captioner"
    decoding = Decoding(
        max_new_tokens=max_new_tokens, num_beams=settings.num_beams or 1, length_penalty=settings.length_penalty or 0.0
    )
    batch_size = settings.batch_size
    accelerator = stage.accelerator

    def validate(step: int, logged: Mapping[str, float]) -> Validation:
        """Caption the split with the policy as it is at ``step``."""
        decoded = decode_rows(captioner, captioner.policy, stage.val_rows, decoding, batch_size, accelerator)
        captions = {image_id: caption for image_id, (caption, _) in decoded.items()}
        folder = stage.folder / "eval" / f"step-{step:08d}"
        if accelerator.is_main_process:
            records = [{"image_id": image_id, "caption": caption} for image_id, caption in captions.items()]
            write_json(folder / "predictions.json", records)
        words = [len(caption.split()) for caption in captions.values()]
        metrics = {"val/cider": validation_cider(captions, references), "val/length": sum(words) / len(words)}
        if monitor is None:
            return Validation(metrics)

        def inspect() -> Validation:
            """Let the monitor judge the captions, and keep its judges' scores."""
            rows = [stage.val_rows[index] for index in range(len(stage.val_rows))]
            finished = [decoded[row["image_id"]][1] for row in rows]
            policy = {key: logged[f"policy/{key}"] for key in ("entropy", "kl") if f"policy/{key}" in logged}
            texts = [captions[row["image_id"]] for row in rows]
            found, findings = monitor.inspect(step, rows, texts, finished, policy)
            _write_judges(folder, list(captions), findings.judges)
            return found

        found = _decided_once(inspect, accelerator)
        return replace(found, metrics=metrics | found.metrics)

    return validate


def _write_judges(folder: Path, image_ids: list[str], judges: Mapping[str, object]) -> None:
    """``judges.json``: image ids in their order, and the scores of each judge in the same order."""
    write_json(folder / "judges.json", {"image_id": image_ids, "judges": dict(judges)})


def _decided_once(judge: Callable[[], Validation], accelerator: Accelerator) -> Validation:
    """What ``judge`` returns on the main process, for all: scores that differ in a last bit must not part them.

    Raises:
        RewardError: on every process, where it is raised on the main one.
    """
    outcome: list[Validation | str | None] = [None]
    if accelerator.is_main_process:
        try:
            outcome = [judge()]
        except RewardError as error:
            if accelerator.num_processes == 1:
                raise
            outcome = [str(error)]
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    (found,) = outcome
    if not isinstance(found, Validation):
        raise RewardError(str(found))
    return found
