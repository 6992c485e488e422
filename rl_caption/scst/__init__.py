"""The algorithm: sample, score, advantages, objective, and cross-entropy."""

ADVANTAGES = {
    name: f"rl_caption.scst.advantages:{name}"
    for name in ("leave_one_out", "greedy", "mean", "group_norm", "none")
}
STRUCTURED = ("seq_nll", "risk", "max_margin", "multi_margin", "softmax_margin")
OBJECTIVES = {
    name: f"rl_caption.scst.objectives:{target}"
    for name, target in {
        "reinforce": "Reinforce",
        "ppo_clip": "PpoClip",
        "dico": "Dico",
    }.items()
} | {name: f"rl_caption.scst.objectives:{name}" for name in STRUCTURED}
"""Name -> ``module:Name``; imported when a configuration asks for it."""
