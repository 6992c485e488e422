"""Captions of images by a saved captioner, or by several together, and the choice among several captions of one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from rewards.base import Reward, RewardError, checked_scores
from rewards.registry import build_tokenized, registered
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.tokenize import TOKENIZER
from rl_caption.captioners.base import Captioner, Decoding
from rl_caption.captioners.ensemble import Average, Ensemble
from rl_caption.captioners.loading import load_captioner
from rl_caption.config.build import quiet_libraries
from rl_caption.data.base import Row, reward_inputs
from rl_caption.data.files import write_json_lines
from rl_caption.errors import ConfigError, config_errors
from rl_caption.training.validation import Candidate, decode_candidates


@dataclass(frozen=True)
class Captions:
    """Captions of images, of which one each is chosen: by its reward, the first of the best, or else the first.

    Args:
        candidates: image id -> captions.
        rewards: image id -> a reward for each of them; None was not asked for.
    """

    candidates: Mapping[str, Sequence[Candidate]]
    rewards: Mapping[str, Sequence[float]] | None = None

    def chosen(self, image_id: str) -> int:
        """Index of the chosen candidate."""
        return 0 if self.rewards is None else self.rewards[image_id].index(max(self.rewards[image_id]))

    def texts(self) -> dict[str, str]:
        """Image id -> chosen caption."""
        return {image_id: own[self.chosen(image_id)].caption for image_id, own in self.candidates.items()}

    def write(self, path: str | Path, ids: Mapping[str, int | str] | None = None) -> None:
        """Write a JSON line an image: ``image_id``, the index ``chosen``, and ``candidates``.

        Each candidate has ``caption``, ``finished`` (it ended with EOS) and, where there are, ``score`` (of beam
        search) and ``reward`` (of what reranked). ``ids`` are written in place of the image ids.
        """
        lines = [
            {
                "image_id": image_id if ids is None else ids[image_id],
                "chosen": self.chosen(image_id),
                "candidates": list(self._shown(image_id)),
            }
            for image_id in self.candidates
        ]
        write_json_lines(path, lines)

    def _shown(self, image_id: str) -> Iterator[dict[str, Any]]:
        for index, candidate in enumerate(self.candidates[image_id]):
            shown = {key: value for key, value in candidate._asdict().items() if value is not None}
            yield shown if self.rewards is None else {**shown, "reward": self.rewards[image_id][index]}


def load_captioners(names: Sequence[str], prompt: str | None, average: Average) -> Captioner:
    """The captioner of one name, or the ensemble of several. Raises ``CaptionerError``."""
    quiet_libraries()
    if len(set(names)) < len(names):
        raise ConfigError(f"models are {list(names)}: one is there twice")
    loaded = {name: load_captioner(name, prompt=prompt) for name in names}
    return loaded[names[0]] if len(loaded) == 1 else Ensemble(loaded, average)


def build_reranker(
    name: str, kwargs: Mapping[str, Any], references: Sequence[list[str]], tokenizer: str = TOKENIZER
) -> Reward:
    """The reward that chooses among captions; ``tokenizer`` is ``data.tokenizer``, unless ``kwargs`` name another.

    ``consensus`` has the document frequencies of ``references``, those of the training images, unless its arguments say
    otherwise; without any, all n-grams weigh alike.

    Raises:
        ConfigError: it cannot be built, or needs references: a caption must not be chosen by what it is judged by.
    """
    arguments = dict(kwargs)
    if registered(name) == "consensus" and "df" not in arguments and len(references) > 1:
        own = arguments.setdefault("tokenizer", tokenizer)
        arguments["df"] = DocumentFrequencies.from_texts(references, eos=False, tokenizer=own)
    with config_errors("rerank"):
        reward = build_tokenized(name, arguments, tokenizer)
    if "references" in reward.columns:
        raise ConfigError(
            f"rerank is {name!r}, which needs references: a caption must not be chosen by what it is judged by; take "
            "consensus, or a reward of images such as clipscore"
        )
    return reward


def caption_rows(
    captioner: Captioner,
    rows: Sequence[Row],
    decoding: Decoding,
    batch_size: int,
    accelerator: Accelerator,
    seed: int,
) -> Captions:
    """Decode captions of rows; called by every process. Raises ``DataError`` where a row cannot be captioned."""
    for row in rows:
        captioner.max_tokens_of(row)
    policy = captioner.policy.to(accelerator.device)
    return Captions(decode_candidates(captioner, policy, rows, decoding, batch_size, accelerator, "captioning", seed))


def reranked(captions: Captions, rows: Sequence[Row], reward: Reward) -> Captions:
    """Captions of rows, chosen by a reward of them. Raises ``RewardError`` where the reward failed."""
    candidates = captions.candidates
    pairs = [(row, candidate) for row in rows for candidate in candidates[row["image_id"]]]
    prompts, columns = reward_inputs([row for row, _ in pairs], [candidate.finished for _, candidate in pairs])
    columns.pop("references", None)  # for no reward to look at
    try:
        found = reward(prompts, [candidate.caption for _, candidate in pairs], **columns)
        scores = iter(checked_scores(reward, found, len(pairs)))
    except RewardError as error:
        raise RewardError(f"rerank: {error}") from error
    rewards = {row["image_id"]: [next(scores) for _ in candidates[row["image_id"]]] for row in rows}
    return Captions(candidates, rewards)
