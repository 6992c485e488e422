"""Validation of a captioner during training: captions of the validation split, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from rewards.base import RewardError
from rl_caption.captioners.base import Captioner, Decoding
from rl_caption.config.schema import CaptionEvalConfig
from rl_caption.data.files import write_json
from rl_caption.evaluation import validation_cider
from rl_caption.monitoring.monitor import HackingMonitor
from rl_caption.training.inference import decode_rows
from rl_caption.training.setup import Context
from rl_caption.types import Validation


class CaptionValidator:
    """Captions the validation images as ``config.eval`` says, and scores the captions. Called by every process.

    It writes the captions to ``eval/step-N/predictions.json`` in COCO result format and, with a monitor, the scores of
    every image by the judges to ``eval/step-N/judges.json``.

    Args:
        context: of the run.
        captioner: its policy is validated.
        max_new_tokens: length limit in tokens, EOS included.
        monitor: looks for signs of reward hacking.
    """

    def __init__(
        self, context: Context, captioner: Captioner, max_new_tokens: int, monitor: HackingMonitor | None = None
    ) -> None:
        settings = context.config.eval
        assert isinstance(settings, CaptionEvalConfig), "of a captioner"
        self.context, self.captioner, self.monitor = context, captioner, monitor
        self.batch_size = settings.batch_size
        self.decoding = Decoding(
            max_new_tokens=max_new_tokens,
            num_beams=settings.num_beams or 1,
            length_penalty=settings.length_penalty or 0.0,
        )
        self.references = {row["image_id"]: row["references"] for row in context.val_rows}

    def __call__(self, step: int, logged: Mapping[str, float]) -> Validation:
        """Caption the split with the policy as it is at ``step``; ``logged`` is what the newest step logged."""
        rows, accelerator, captioner = self.context.val_rows, self.context.accelerator, self.captioner
        decoded = decode_rows(captioner, captioner.policy, rows, self.decoding, self.batch_size, accelerator)
        captions = {image_id: caption for image_id, (caption, _) in decoded.items()}
        if accelerator.is_main_process:
            records = [{"image_id": image_id, "caption": caption} for image_id, caption in captions.items()]
            write_json(self._folder(step) / "predictions.json", records)
        words = [len(caption.split()) for caption in captions.values()]
        metrics = {"val/cider": validation_cider(captions, self.references), "val/length": sum(words) / len(words)}
        if self.monitor is None:
            return Validation(metrics)
        found = _decided_once(partial(self._inspect, self.monitor, step, decoded, logged), accelerator)
        return replace(found, metrics=metrics | found.metrics)

    def _inspect(
        self,
        monitor: HackingMonitor,
        step: int,
        decoded: Mapping[str, tuple[str, bool]],
        logged: Mapping[str, float],
    ) -> Validation:
        """Let the monitor judge the captions (image id -> text, and whether it ended), and keep its judges' scores."""
        rows = [self.context.val_rows[index] for index in range(len(self.context.val_rows))]
        texts = [decoded[row["image_id"]][0] for row in rows]
        finished = [decoded[row["image_id"]][1] for row in rows]
        policy = {key: logged[f"policy/{key}"] for key in ("entropy", "kl") if f"policy/{key}" in logged}
        found, findings = monitor.inspect(step, rows, texts, finished, policy)
        judges = {"image_id": list(decoded), "judges": dict(findings.judges)}
        write_json(self._folder(step) / "judges.json", judges)
        return found

    def _folder(self, step: int) -> Path:
        return self.context.folder / "eval" / f"step-{step:08d}"


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
