"""Fine-tune decoder-only vision-language models with TRL's trainers on this package's
rewards and data.
"""
