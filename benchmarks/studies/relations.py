"""What it takes to learn relations: scenes with captions that tell one, a wider image encoder, and two measures.

    python -m benchmarks.studies.relations --captioners FOLDER ... --dual FOLDER ...
    python -m benchmarks.studies.relations --evaluations FOLDER ...

prints how often captioners, by likelihood, and dual encoders, by cosine, score a caption above the same with another
relation, and by how much; or how many relations the captions of evaluations state and how many of them are true,
in all and by axis.
docs/results_composition.md ("Binding and relations") has the configurations.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rewards.base import Reward, RewardError, as_texts, required_column
from rewards.clip.specs import Specs
from rewards.text.tokenize import tokenize
from rl_caption.captioners.image_encoder import CaptionerImage
from rl_caption.captioners.loading import load_captioner
from rl_caption.data.base import Row, Splits
from rl_caption.data.scenes import ScenesData, hard_negatives
from rl_caption.data.scenes.oracle import claims
from rl_caption.data.scenes.world import Scene
from rl_caption.runtime.options import add_trust
from rl_caption.scst.objectives import token_logprobs

_RELATION = re.compile(r"\b(left|right|above|over|below|beneath|under)\b")
_HORIZONTAL = {"left", "right"}


class RelationScenes(Splits):
    """The first scenes of ``ScenesData`` of which a text tells a relation, with these texts as their references.

    The texts are short captions of the scene and sentences of its long description.

    Args:
        num_train: number of training scenes; about every second scene has a relation.
        num_val: number of validation scenes.
        captions_per_image: how many short captions of a scene are searched, 1 to 20.
        min_references: scenes with fewer different references are left out; ``judge`` needs 2.
    """

    def __init__(
        self,
        num_train: int = 30829,
        num_val: int = 403,
        captions_per_image: int = 12,
        min_references: int = 1,
    ) -> None:
        sizes = {"train": num_train, "val": num_val}
        scenes = ScenesData(
            4 * num_train + 20, 4 * num_val + 20, 0, 0, captions_per_image=captions_per_image
        )
        relations = {split: map(_with_relations, scenes.split(split)) for split in sizes}
        told = {
            split: (row for row in relations[split] if _different(row) >= min_references)
            for split in sizes
        }
        super().__init__(
            {split: list(islice(told[split], sizes[split])) for split in sizes},
            "scenes with relations",
        )


def _with_relations(row: Row) -> Row:
    sentences = [sentence.rstrip(".") + "." for sentence in row["long_reference"].split(". ")]
    texts = [text for text in [*row["references"], *sentences] if _RELATION.search(text)]
    return {**row, "references": texts}


def _different(row: Row) -> int:
    return len({" ".join(tokenize(text)) for text in row["references"]})


class WideCaptionerImage(CaptionerImage):
    """``CaptionerImage`` with an MLP on every patch that gives it ``width`` values.

    A dual encoder takes the mean over patches. That mean tells where a thing is only if some of its values stand for
    this thing at this place, so it needs many values. ``cell_width`` of a dual encoder does the same with a LayerNorm
    before ``skip``, and also over a frozen encoder.
    """

    def __init__(self, model: str, pretrained: bool = True, width: int = 512) -> None:
        super().__init__(model, pretrained)
        states = self.built_from[0].d_model
        self.mlp = nn.Sequential(
            nn.LayerNorm(states), nn.Linear(states, width), nn.GELU(), nn.Linear(width, width)
        )
        self.skip = nn.Linear(states, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, S, S] -> states [B, H, W, ``width``]."""
        states = super().forward(pixels)
        return self.skip(states) + self.mlp(states)


class CaptionLikelihood:
    """Log-probability of a caption and its EOS given the image, under a captioner: a score for ``judge``, in nats.

    A caption with a word that the vocabulary lacks has probability 0 and the lowest score.

    Source: Lin et al., ICML 2024, "Revisiting the Role of Language Priors in Vision-Language Models" (VisualGPTScore).

    Args:
        model: folder of a captioner with positions for ``max_tokens`` tokens, EOS included.

    A call raises ``RewardError`` for a caption that is longer.
    """

    __name__ = "likelihood"
    columns = frozenset({"image"})
    bounds = (-1e6, 0.0)

    def __init__(self, model: str, max_tokens: int = 32, batch_size: int = 64) -> None:
        self.captioner, self.max_tokens, self.batch_size = (
            load_captioner(model),
            max_tokens,
            batch_size,
        )
        self.captioner.policy.eval()
        self.signature = f"likelihood[{model}]"

    @torch.no_grad()
    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        captions, captioner = as_texts(completions), self.captioner
        images = required_column(columns, "image", self.__name__, len(captions))
        scores: list[float] = []
        for start in range(0, len(captions), self.batch_size):
            texts = captions[start : start + self.batch_size]
            rows: list[Row] = [
                {"image_id": str(number), "image": image, "references": []}
                for number, image in enumerate(images[start : start + self.batch_size], start)
            ]
            encoded = captioner.encode(texts, self.max_tokens)
            for text, ids in zip(texts, encoded, strict=True):
                if ids[-1] != captioner.eos_token_id:
                    raise RewardError(
                        f"caption {text!r} has more than {self.max_tokens} tokens with EOS: raise max_tokens"
                    )
            token_ids = pad_sequence(
                [torch.tensor(ids) for ids in encoded],
                batch_first=True,
                padding_value=captioner.pad_token_id,
            ).unsqueeze(1)
            lengths = [len(ids) for ids in encoded]
            mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).unsqueeze(1)
            logits = captioner.token_logits(
                captioner.policy, captioner.preprocess(rows), token_ids, mask
            )
            logprobs = token_logprobs(logits, token_ids[mask]).split(lengths)
            scores += [
                max(own.sum().item(), self.bounds[0]) for own in logprobs
            ]  # unknown: FORBIDDEN_LOGIT, -1e9
        return scores


def replaced_relations(rows: Sequence[Row]) -> list[tuple[Row, str, str, str]]:
    """(Row, its first reference, the same with another relation, what was replaced) of rows where that can be done."""
    found = []
    for row in rows:
        true = row["references"][0]
        for kind, false in hard_negatives(row["scene"], true, 0):
            told, other = [set(_RELATION.findall(text.lower())) for text in (true, false)]
            if kind == "replace_relation" and len(told) == len(other) == 1:
                horizontal = [bool(words & _HORIZONTAL) for words in (told, other)]
                opposite = "left for right" if horizontal[0] else "above for below"
                what = opposite if horizontal[0] == horizontal[1] else "another axis"
                found.append((row, " ".join(tokenize(true)), " ".join(tokenize(false)), what))
    return found


def stated_relations(
    predictions: Path, scenes: Mapping[str, Scene]
) -> tuple[int, list[bool], list[bool]]:
    """Captions in a file of an evaluation, and for each relation that they state whether it is true.

    First those of "left" and "right", then those of "above" and "below".
    """
    captions = {
        entry["image_id"]: entry["caption"] for entry in json.loads(predictions.read_text())
    }
    found = [claim for name, caption in captions.items() for claim in claims(caption, scenes[name])]
    beside, over = [
        [
            claim.true
            for claim in found
            if claim.kind == "relation" and any(word in claim.text for word in words)
        ]
        for words in ((" left of ", " right of "), (" above ", " below "))
    ]
    return len(captions), beside, over


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--captioners", nargs="*", default=[], help="folders of captioners")
    parser.add_argument("--dual", nargs="*", default=[], help="folders of dual encoders")
    parser.add_argument("--scenes", type=int, default=1000, help="scenes of the validation split")
    parser.add_argument(
        "--evaluations",
        nargs="*",
        default=[],
        help="folders of evaluations, of scenes of val or test",
    )
    add_trust(parser)
    args = parser.parse_args(argv)
    if args.evaluations:
        data = ScenesData(0, 4 * args.scenes + 20, args.scenes, 0)
        scenes = {
            row["image_id"]: row["scene"] for split in ("val", "test") for row in data.split(split)
        }
        print(
            "| | captions | relations stated | true, % | left or right | true, % | above or below | true, % |"
        )
        print("|---" * 8 + "|")
        for folder in args.evaluations:
            count, beside, over = stated_relations(Path(folder) / "predictions.json", scenes)
            cells = [
                f"{len(true):,} | {100 * np.mean(true) if true else float('nan'):.1f}"
                for true in (beside + over, beside, over)
            ]
            print(f"| {folder} | {count:,} | " + " | ".join(cells) + " |")
        return
    pairs = replaced_relations(list(RelationScenes(0, args.scenes).split("val")))
    images, kinds = [row["image"] for row, *_ in pairs], [what for *_, what in pairs]
    models: dict[str, tuple[Reward, float]] = {
        path: (CaptionLikelihood(path), 1.0) for path in args.captioners
    }
    models |= {
        path: (Specs(path, scale="shifted"), 2.0) for path in args.dual
    }  # half a cosine, plus one half
    names = ["left for right", "above for below", "another axis"]
    heads = [
        *(f"{name} ({kinds.count(name):,} pairs)" for name in names),
        "all",
        "mean difference, nats or cosine",
    ]
    print("| % right | " + " | ".join(heads) + " |")
    print("|---" * (len(heads) + 1) + "|")
    for path, (model, scale) in models.items():
        true, false = (
            np.asarray(model(None, [pair[n] for pair in pairs], image=images)) for n in (1, 2)
        )
        right = 100.0 * (true > false)
        shares = [*(right[[kind == name for kind in kinds]].mean() for name in names), right.mean()]
        difference = scale * np.abs(true - false).mean()
        print(
            f"| {path} | "
            + " | ".join(f"{share:.1f}" for share in shares)
            + f" | {difference:.4f} |"
        )


if __name__ == "__main__":
    main()
