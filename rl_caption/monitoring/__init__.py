"""Detection of reward hacking: the rule, the monitor that applies it at every
validation, its held-out judges.
"""
