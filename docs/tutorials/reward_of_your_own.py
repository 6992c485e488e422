# %% [markdown]
# # A reward of your own, and its ablation
#
# A reward is a plain object: captions in, one finite number a caption out. This tutorial writes one, gives it to
# self-critical training (SCST), and finds out what it does to captions: alone, mixed with CIDEr-D, and against
# CIDEr-D alone. The pictures are [generated](../scenes.md), so that the truth about each is known and cannot be
# argued with.
#
# The sizes are chosen for minutes on one CPU core.

# %%
IMAGES = 1000  # to train on
XE_STEPS = 300
SCST_STEPS = 60
BATCH_SIZE = 32
WIDTH = 128  # of the model

# %%
import json
import shlex
from pathlib import Path

from rl_caption.cli.main import main


def rl_caption(command: str) -> None:
    """What ``python -m rl_caption COMMAND`` does."""
    assert main(shlex.split(command)) == 0


# %% [markdown]
# ## The reward
#
# Suppose that captions name too few colours, and that colours matter to you. The reward below pays for each colour
# that a caption names, up to two. It goes into a file of its own, because training imports it by name:
# `my_rewards:Colours`.
#
# Beside the call a reward has four attributes: the name under which it is logged, the columns of the data that it
# reads (none here; `references`, `image` and `image_id` are others), the bounds of its values, and a signature that
# names everything its values depend on. A run does not resume under another signature.

# %%
Path("my_rewards.py").write_text('''
NAMES = frozenset(["red", "orange", "yellow", "green", "blue", "purple", "pink", "cyan"])


class Colours:
    """Different colours that a caption names, as a share of `wanted`; at most 1."""

    __name__, columns, bounds = "colours", frozenset(), (0.0, 1.0)

    def __init__(self, wanted: int = 2) -> None:
        self.wanted = wanted
        self.signature = f"colours[wanted{wanted}]"

    def __call__(self, prompts, completions, **columns) -> list[float]:
        found = [NAMES & set(text.lower().split()) for text in completions]
        return [min(1.0, len(names) / self.wanted) for names in found]
''')
from my_rewards import Colours

reward = Colours()

# %% [markdown]
# Try it before any training. `checked_scores` is what the training loop does with every result: a wrong number of
# scores, or one that is not finite, is an error, because a policy would learn from it.

# %%
from rewards import checked_scores

captions = [
    "a red circle",
    "a red circle above a blue star",
    "two stars",
    "red blue red blue red blue",
]
for caption, score in zip(
    captions, checked_scores(reward, reward(None, captions), len(captions)), strict=True
):
    print(f"{score:.1f}  {caption}")

# %% [markdown]
# The last caption shows what will go wrong: nothing in this reward asks whether a colour is in the picture, or
# whether the words are a sentence. It is cheaper to find that out here than after a night of training.
#
# ## A captioner to start from
#
# All runs of an ablation start from the same captioner, trained by cross-entropy as in [the first
# tutorial](own_photos.py#cross-entropy).

# %%
data = f"""
data:
  format: scenes
  kwargs: {{num_train: {IMAGES}, num_val: {max(20, IMAGES // 10)}, num_test: {max(20, IMAGES // 6)}}}
"""
Path("xe.yaml").write_text(f"""
model:
  kwargs: {{image_size: 64, patch_size: 8, patch_stem: conv, d_model: {WIDTH}, encoder_layers: 2, decoder_layers: 2,
           num_heads: 4, ffn_dim: {4 * WIDTH}, max_positions: 24}}
{data}
train:
  max_steps: {XE_STEPS}
  batch_size: {BATCH_SIZE}
  threads: 1
  lr: 1.0e-3
  schedule: cosine
  warmup_steps: {XE_STEPS // 10}
  label_smoothing: 0.1
  captions_per_image: 5
  max_target_tokens: 20
eval: {{every: {XE_STEPS // 2}}}
run: {{dir: runs/xe, log_every: {XE_STEPS // 3}}}
""")
rl_caption("xe --config xe.yaml")

# %% [markdown]
# ## The grid
#
# `recipe` is what all runs share. A cell replaces the reward's terms; a term of one's own has a `target`. `judges` are
# scores that become columns of the table, and the reward itself is one of them. With `seeds: [0, 1, 2]` each cell is
# run three times and the table has means and standard deviations. One seed, as here for the sake of time, shows the
# direction of large effects and nothing about small ones.

# %%
Path("base.yaml").write_text(f"""
model: {{init: runs/xe/export/best}}
{data}
rollout: {{num_samples: 5, max_new_tokens: 20}}
reward: {{terms: {{cider: {{weight: 1.0}}}}}}
train: {{max_steps: {SCST_STEPS}, batch_size: {BATCH_SIZE}, threads: 1, lr: 1.0e-4, warmup_steps: {SCST_STEPS // 6}}}
eval: {{every: {SCST_STEPS // 2}}}
run: {{dir: runs/base, log_every: {SCST_STEPS // 3}}}
""")
Path("ablation.yaml").write_text("""
recipe: base.yaml
cells:
  CIDEr-D: {terms: {cider: {weight: 1.0}}}
  mixture: {terms: {cider: {weight: 1.0}, colours: {weight: 1.0, target: "my_rewards:Colours"}}}
  colours: {terms: {colours: {weight: 1.0, target: "my_rewards:Colours"}}}
seeds: [0]
metrics: [bleu, rouge, cider]
judges: {colours: {target: "my_rewards:Colours"}}
out: ablation
""")
rl_caption("ablate --config ablation.yaml")

# %% [markdown]
# ## Reading the table
#
# Every row is a captioner on the same `test` pictures; the first is the one that all runs started from.
#
# - The column `colours` is the reward. In the row `colours` it is above the start: training found what it was paid for.
# - `oracle` is the truth, which no reward here sees: precision is the share of a caption's claims that are true. In
#   the row `colours` it falls, while repeated n-grams and length rise. The captions below show why: colour
#   after colour, in the picture or not. That is reward hacking.
# - CIDEr compares with what people, here the generated references, say. It falls with the reward that ignores them.
# - The last column has the step at which the [monitor](../scst.md#hacking-of-the-reward) noticed, by scores that are
#   not in the reward. It does not see the truth either.
# - The row `mixture` answers the question that one really has: does the term add colours at a price that one would
#   pay? At weight 1 it hardly moves the column `colours`: CIDEr-D tells the samples of a picture apart more strongly,
#   and the policy follows it. Another weight is the next experiment. No weight teaches this reward which colours are
#   there.
#
# `rl-caption report ablation/cells/*/seed0/test_last` makes a page of the captions of all. Here is one picture:

# %%
for path in sorted(Path("ablation").glob("**/test*/predictions.json")):
    first = json.loads(path.read_text())[0]
    print(f"{path.parent.relative_to('ablation')!s:<36} {first['caption']}")

# %% [markdown]
# ## What next
#
# - Mend it: with `columns = frozenset({"references"})` the reward gets `columns["references"]`, a list of captions for
#   each completion, and can pay only for colours that a reference names. `image` gives it the picture itself.
# - `reward.normalize: per_term` makes the weights of terms comparable ([Normalisation](../rewards.md#normalisation)).
# - The same object runs under TRL's `GRPOTrainer` and `RLOOTrainer`: [TRL](../trl.md).
# - A grid over a mixture's weight is a cell for each weight: [Grids of runs](../scst.md#grids-of-runs).
