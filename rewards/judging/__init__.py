"""How well a reward, or the model behind it, agrees with people or with a known truth."""
