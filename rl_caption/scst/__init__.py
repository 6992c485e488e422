"""The algorithm: sample, score, advantages, objective, and cross-entropy."""

ADVANTAGES = {
    name: f"rl_caption.scst.advantages:{name}" for name in ("leave_one_out", "greedy", "mean", "group_norm", "none")
}
OBJECTIVES = {"reinforce": "rl_caption.scst.objectives:Reinforce"}
"""Name -> ``module:Name``; imported when a configuration asks for it."""
