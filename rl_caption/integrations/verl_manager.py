"""verl: a reward manager, which unlike ``compute_score`` knows whether a caption ended.

``reward.reward_manager.source=importlib``, ``.name=ServedRewardManager``,
``.module.path=pkg://rl_caption.integrations.verl_manager``; the server's address as for ``compute_score``.
"""

from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from rl_caption.integrations.verl import compute_score


class ServedRewardManager(RewardManagerBase):  # type: ignore[misc]
    """Rewards by the server at ``reward.custom_reward_function.reward_kwargs.url``, or else ``RL_CAPTION_URL``."""

    def __init__(self, config: Any, tokenizer: Any, *arguments: Any, **_: Any) -> None:
        super().__init__(config, tokenizer, None)
        self.options = dict(
            (config.reward.get("custom_reward_function") or {}).get("reward_kwargs") or {}
        )

    async def run_single(self, data: Any) -> dict[str, Any]:
        """``{"reward_score", "reward_extra_info"}`` of the last row of ``data``. Raises ``ServerError``."""
        row = data[-1:][0]
        padded_ids, texts = row.batch["responses"], row.non_tensor_batch
        ids = padded_ids[: row.batch["attention_mask"][-len(padded_ids) :].sum()]
        caption = self.tokenizer.decode(ids, skip_special_tokens=True)
        finished = len(ids) > 0 and int(ids[-1]) == self.tokenizer.eos_token_id
        scores = await compute_score(
            texts["data_source"],
            caption,
            texts["reward_model"]["ground_truth"],
            texts.get("extra_info"),
            finished=finished,
            **self.options,
        )
        return {"reward_score": scores["score"], "reward_extra_info": scores}
