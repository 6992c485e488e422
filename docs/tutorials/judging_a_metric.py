# %% [markdown]
# # Judging a metric
#
# A metric is used to choose between captioners, and as a reward it even trains them. Does it agree with what is true
# of a picture, and with people? This tutorial asks both of a metric that you bring, next to metrics that everybody
# uses. Nothing is trained.

# %%
IMAGES = 200  # whose captions are judged
RESAMPLES = 1000  # for the intervals

# %%
import json
import shlex
from pathlib import Path

from rl_caption.cli.main import main


def rl_caption(command: str) -> None:
    """What ``python -m rl_caption COMMAND`` does."""
    assert main(shlex.split(command)) == 0


# %% [markdown]
# ## A metric
#
# A metric has the form of a [reward](reward_of_your_own.py): captions in, one number a caption out. This one is as
# simple as they come: the share of a caption's different words that some reference has, too. It knows nothing of word
# order.

# %%
Path("my_metrics.py").write_text('''
from rewards.text.tokenize import tokenize


class SharedWords:
    """Share of a caption's different words that at least one reference has, in [0, 1]."""

    __name__, columns, bounds, signature = "shared_words", frozenset({"references"}), (0.0, 1.0), "shared_words"

    def __call__(self, prompts, completions, **columns) -> list[float]:
        captions = [set(tokenize(text)) for text in completions]
        known = [{word for text in texts for word in tokenize(text)} for texts in columns["references"]]
        return [len(words & seen) / len(words) if words else 0.0 for words, seen in zip(captions, known, strict=True)]
''')
from my_metrics import SharedWords

# %% [markdown]
# ## Against the truth
#
# Of [generated pictures](../scenes.md) everything is known, so that any caption can be judged exactly: the oracle's
# F1 counts what it says that is true, what it says that is false, and what it leaves out. The set `scenes` has
# references, and false captions made from them by one edit each (another colour, two words exchanged, ...), called
# hard negatives. `length`, the number of words, is there as a control: a metric that is no better has measured how
# long a caption is.

# %%
rl_caption(
    f"judge --set scenes --set_kwargs.num_images {IMAGES} --metrics bleu4,rouge,cider,length"
    f" --judges.SharedWords.target my_metrics:SharedWords --bootstrap {RESAMPLES} --out truth"
)

# %% [markdown]
# Two questions, and a metric may answer one and fail the other:
#
# - **Kendall's tau**: of two captions, does the metric order them as the truth does? 100 is always, 0 is chance. Tau
#   over all captions also compares captions of different pictures; tau within a picture is what a reward in SCST uses,
#   since samples are compared with other samples of their picture. `length` shows that the two are not the same: over
#   all captions it seems to measure something, because captions that say more are longer; within a picture, where the
#   false captions are as long as the true one, it is at chance.
# - **Hard negatives**: does the true caption score above the false one made from it? 50 % is chance, and a tie is a
#   failure. Read it kind by kind. `SharedWords` cannot see `word_order`, `swap_object`, `swap_relation` or
#   `swap_attribute`, because the words stay the same, and its numbers there say so. On the other kinds it is not far
#   behind the best, and the last column alone would not tell why.
#
# The brackets are 95 % intervals over pictures. Two metrics whose intervals overlap widely are not told apart by this
# many pictures.
#
# ## Against people
#
# Ratings by people go into a file with one JSON object a line: picture, caption, rating, and the references if the
# metric wants them. Collect your own, or read a [published set](../judging.md#sets) such as Flickr8k-Expert by its
# name.
#
# No people can be shipped with a tutorial. A stand-in takes their place: the oracle's F1 in four grades, which one in
# five times is a grade off, as people's are. **So the numbers below say nothing about people**; the file and the
# command are what you would use.

# %%
import random

from rl_caption.data.scenes import ScenesData, hard_negatives, oracle

draw = random.Random(0)
with open("ratings.jsonl", "w") as file:
    for index, row in enumerate(ScenesData(num_test=IMAGES)["test"]):
        own, *others = row["references"]
        judged = [
            own,
            *(text for _, text in hard_negatives(row["scene"], own, seed=index)[:3]),
        ]
        for caption in judged:
            grade = 1 + min(3, int(4 * oracle(caption, row["scene"]).f1))
            grade = min(4, max(1, grade + draw.choice([-1, 0, 0, 0, 0, 0, 0, 0, 0, 1])))
            line = {
                "image": row["image_id"],
                "caption": caption,
                "rating": grade,
                "references": others,
            }
            print(json.dumps(line), file=file)
print(Path("ratings.jsonl").read_text().partition("\n")[0])

# %%
rl_caption(
    "judge --set ratings --data ratings.jsonl --metrics bleu4,rouge,cider,length"
    f" --judges.SharedWords.target my_metrics:SharedWords --bootstrap {RESAMPLES} --out people"
)

# %% [markdown]
# Papers print tau_b or tau_c, depending on the set; [the conventions](../judging.md#conventions) say which. Values of
# different sets do not compare: they depend on which captions were rated.
#
# ## In Python
#
# `rated_figures` takes any scores, also of a metric that is no reward of this package:

# %%
from rl_caption.lab.meta_evaluation.figures import rated_figures
from rl_caption.lab.meta_evaluation.sets import load

(rated,) = load("ratings", "ratings.jsonl")
scores = SharedWords()(None, rated.captions, references=rated.references)
for figure in rated_figures(rated, scores, lengths=[]):
    print(f"{figure.name}: {figure.value}")

# %% [markdown]
# ## What next
#
# - Metrics that look at the picture are judged by the same commands: `--judges.CLIPS.target clipscore
#   --judges.CLIPS.kwargs.backbone MODEL` ([CLIPScore](../rewards.md#clipscore-and-l-clipscore)).
# - A metric that agrees with people may still be a bad reward: training finds what it overlooks. [A reward of your
#   own](reward_of_your_own.py) shows how to see that, [Hacking of the
#   reward](../scst.md#hacking-of-the-reward) how it is watched.
# - [Meta-evaluation](../judging.md) has the published sets, how each figure is defined, and what was reproduced.
