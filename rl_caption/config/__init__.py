"""Configuration: pydantic models, which check themselves, and what is built from them."""
