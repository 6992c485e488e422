"""verl: a reward manager that asks ``rl-caption serve`` (docs/serve.md)."""

import asyncio
from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from rl_caption.integrations.client import RewardClient


class ServedRewardManager(RewardManagerBase):  # type: ignore[misc]
    """Reward manager that scores captions by the server at
    ``reward.custom_reward_function.reward_kwargs.url``.
    """

    def __init__(self, config: Any, tokenizer: Any, *_: Any, **__: Any) -> None:
        super().__init__(config, tokenizer, None)
        options = config.reward.custom_reward_function.get("reward_kwargs") or {}
        self.client = RewardClient(options.get("url"))

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Score the caption of the last row. ``image``, ``image_id`` and ``references``
        come from ``extra_info``. Raises ``ServerError``.
        """
        row = data[-1:][0]
        fields, ids = row.non_tensor_batch, row.batch["responses"]
        ids = ids[: row.batch["attention_mask"][-len(ids) :].sum()]
        caption = self.tokenizer.decode(ids, skip_special_tokens=True)
        finished = len(ids) > 0 and int(ids[-1]) == self.tokenizer.eos_token_id
        columns = {
            "finished": [finished],
            "references": [fields["reward_model"]["ground_truth"]],
        }
        for name in ("image", "image_id", "references"):
            if name in fields.get("extra_info", {}):
                columns[name] = [fields["extra_info"][name]]
        scores = await asyncio.to_thread(self.client.score, [caption], **columns)
        terms = {name: values[0] for name, values in scores.terms.items()}
        return {"reward_score": scores.total[0], "reward_extra_info": terms}
