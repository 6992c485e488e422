"""Self-critical steps of a tiny captioner, and their gradients."""

import torch
from accelerate import Accelerator

from rewards.mixed import MixedReward
from rl_caption.captioners.config import Decoding
from rl_caption.data.loader import Collate
from rl_caption.scst.advantages import build_advantage, needs_greedy
from rl_caption.scst.objectives import Reinforce
from rl_caption.scst.step import SelfCriticalTask
from tests.captioners_for_tests import tiny_rows

LENGTH = 8


class WordCount:
    """A reward that differs between most captions: fraction of words with an ``a``,
    plus length / 10, plus ``shift``.
    """

    __name__ = "words"
    columns = frozenset()
    bounds = (-10.0, 10.0)
    signature = "words"

    def __init__(self, shift=0.0):
        self.shift = shift

    def __call__(self, prompts, completions, **columns):
        words = [text.split() for text in completions]
        return [
            self.shift + len(w) / 10 + sum("a" in x for x in w) / (len(w) + 1)
            for w in words
        ]


def batches_of(captioner, count, size, rows=()):
    rows = rows or tiny_rows(count)
    collate = Collate(captioner, max_target_tokens=LENGTH, seed=3)
    return [
        collate([(row, 0) for row in rows[start : start + size]])
        for start in range(0, count, size)
    ]


def scst_task(captioner, shift=0.0, **options):
    advantage = build_advantage(options.pop("advantage", "leave_one_out"), {})
    terms = {
        key: options.pop(key) for key in {"loss_reduction", "kl_coef"} & {*options}
    }
    samples = Decoding(
        num_samples=options.pop("num_samples", 4),
        with_greedy=needs_greedy(advantage),
        temperature=options.pop("temperature", 1.0),
        max_new_tokens=LENGTH,
    )
    reward = MixedReward({"words": (WordCount(shift), 1.0)})
    objective = options.pop("objective", Reinforce(**terms))
    decoding = options.pop("decoding", samples)
    return SelfCriticalTask(
        Accelerator(cpu=True),
        captioner,
        captioner.policy,
        reward,
        advantage,
        decoding,
        objective,
        **options,
    )


def gradient(captioner, task, batches, step=0):
    """The step's gradient by parameter; parameters without one are left out."""
    captioner.policy.zero_grad()
    captioner.policy.train()
    (task.log,) = task.training_step(batches, step)
    return {
        n: p.grad.clone()
        for n, p in captioner.policy.named_parameters()
        if p.grad is not None
    }


def norm(gradients):
    return float(torch.stack([g.norm() for g in gradients.values()]).norm())


def assert_equal_gradients(one, other, atol=1e-6):
    assert one.keys() == other.keys()
    assert norm(one) > 1e-3, "a gradient of zero proves nothing"
    for name in one:
        assert torch.allclose(one[name], other[name], atol=atol), name
