"""Rewards for image captions: score captions with any of them, with or without the
trainer in ``rl_caption``.
"""

from rewards.base import Reward, RewardError, as_texts, checked_scores

__all__ = ["Reward", "RewardError", "as_texts", "checked_scores"]
