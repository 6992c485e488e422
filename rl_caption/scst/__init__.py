"""The algorithm: sample, score, advantages, objective; cross-entropy beside it. Nothing here knows a configuration."""
