"""The algorithm: sample, score, advantages, objective, and cross-entropy."""

ADVANTAGES = {
    name: f"rl_caption.scst.advantages:{name}" for name in ("leave_one_out", "greedy", "mean", "group_norm", "none")
}
OBJECTIVES = {
    "reinforce": "rl_caption.scst.objectives:Reinforce",
    "ppo_clip": "rl_caption.scst.objectives:PpoClip",
    "dico": "rl_caption.scst.sequence_objectives:Dico",
} | {
    name: f"rl_caption.scst.sequence_objectives:{name}"
    for name in ("seq_nll", "risk", "max_margin", "multi_margin", "softmax_margin")
}
"""Name -> ``module:Name``; imported when a configuration asks for it."""
