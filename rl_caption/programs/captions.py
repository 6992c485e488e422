"""Captions of images by a saved captioner, and the choice among an image's candidates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from rewards.base import Reward, score_captions
from rewards.build import RewardBuilder
from rewards.registry import short_name
from rewards.text.tokenize import TOKENIZER
from rl_caption.captioners.base import Captioner
from rl_caption.captioners.config import Decoding
from rl_caption.data.base import Row, reward_inputs
from rl_caption.data.files import write_json_lines
from rl_caption.evaluation.results import result_ids
from rl_caption.runtime.errors import ConfigError, config_errors
from rl_caption.training.validation import Candidate, decode_candidates


@dataclass(frozen=True)
class Captions:
    """Candidate captions of images. The first with the highest reward is chosen or,
    without rewards, the first.

    Args:
        candidates: image id -> captions.
        rewards: image id -> reward of each of its captions; None without reranking.
    """

    candidates: Mapping[str, Sequence[Candidate]]
    rewards: Mapping[str, Sequence[float]] | None = None

    def chosen(self, image_id: str) -> int:
        """Index of the chosen candidate."""
        if self.rewards is None:
            return 0
        return self.rewards[image_id].index(max(self.rewards[image_id]))

    def texts(self) -> dict[str, str]:
        """Image id -> chosen caption."""
        return {
            image_id: candidates[self.chosen(image_id)].caption
            for image_id, candidates in self.candidates.items()
        }

    def write(self, path: str | Path) -> None:
        """Write one JSON line per image: ``image_id``, the index ``chosen``, and ``candidates``.

        Each candidate has ``caption``, ``finished`` (it ended with EOS) and, where
        known, ``score`` (of beam search) and ``reward`` (of reranking). The ids are the
        same as in ``predictions.json``.
        """
        lines, ids = [], result_ids(self.candidates)
        for image_id, captions in self.candidates.items():
            candidates = [one._asdict() for one in captions]
            for number, candidate in enumerate(candidates):
                if candidate["score"] is None:
                    del candidate["score"]
                if self.rewards is not None:
                    candidate["reward"] = self.rewards[image_id][number]
            line = {
                "image_id": ids[image_id],
                "chosen": self.chosen(image_id),
                "candidates": candidates,
            }
            lines.append(line)
        write_json_lines(path, lines)


def build_reranker(
    name: str,
    kwargs: Mapping[str, Any],
    references: Sequence[list[str]],
    tokenizer: str = TOKENIZER,
) -> Reward:
    """Build the reward that chooses among captions.

    Args:
        name: name of the reward, or ``package.module:Class``.
        kwargs: its arguments.
        references: captions of the training images. ``consensus`` counts document
            frequencies in them, unless ``kwargs`` have ``df``; without references, all
            n-grams weigh the same.
        tokenizer: ``data.tokenizer``, unless ``kwargs`` name another.

    Raises:
        ConfigError: it cannot be built, or it needs references, by which the captions
            are evaluated.
    """
    builder, arguments = RewardBuilder(references, tokenizer), dict(kwargs)
    with config_errors("rerank"):
        if short_name(name) == "consensus" and len(references) > 1:
            words = arguments.get("tokenizer")
            arguments.setdefault("df", builder.count(eos=False, tokenizer=words))
        reward = builder.build(name, arguments)
    if "references" in reward.columns:
        raise ConfigError(
            f"rerank is {name!r}, which needs references: a caption must not be chosen by what it "
            "is judged by; take consensus, or a reward of images such as clipscore"
        )
    return reward


def caption_rows(
    captioner: Captioner,
    rows: Sequence[Row],
    decoding: Decoding,
    accelerator: Accelerator,
    seed: int,
) -> Captions:
    """Decode captions of rows. Every process must call it. Raises ``DataError`` where a
    row cannot be captioned.
    """
    for row in rows:
        captioner.max_tokens_of(row)
    policy = captioner.policy.to(accelerator.device)
    decoded = decode_candidates(
        captioner, policy, rows, decoding, accelerator, "captioning", seed
    )
    return Captions(decoded)


def rerank_captions(
    captions: Captions, rows: Sequence[Row], reward: Reward
) -> Captions:
    """Add the rewards of all candidates of ``rows``, by which captions are chosen.
    Raises ``RewardError`` if the reward failed.
    """
    candidates = captions.candidates
    repeated: list[Row] = []
    flat: list[Candidate] = []
    for row in rows:
        flat += candidates[row["image_id"]]
        repeated += [row] * len(candidates[row["image_id"]])
    finished = [candidate.finished for candidate in flat]
    prompts, columns = reward_inputs(repeated, finished)
    columns.pop("references", None)  # for no reward to look at
    texts = [candidate.caption for candidate in flat]
    rewards: dict[str, list[float]] = {}
    scores = score_captions(reward, "rerank", prompts, texts, columns)
    for row, score in zip(repeated, scores, strict=True):
        rewards.setdefault(row["image_id"], []).append(score)
    return Captions(candidates, rewards)
