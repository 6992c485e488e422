"""``rewards`` works beside older versions of Transformers than training needs (docs/serve.md)."""

import ast
from pathlib import Path

NAMES = {
    "AutoConfig",
    "AutoImageProcessor",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoProcessor",
    "AutoTokenizer",
    "GPT2Tokenizer",
    "GenerationConfig",
    "RobertaTokenizer",
}
"""Names of Transformers 5.6.0 (``make engines ARGS=oldest_transformers``), and of 5.24.0."""
MODULES = {"utils"}
REWARDS = Path(__file__).parents[3] / "rewards"


def test_rewards_take_from_transformers_only_names_that_old_versions_have():
    for path in REWARDS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "transformers":
                unknown = {alias.name for alias in node.names} - NAMES - MODULES
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                parts = node.module.split(".")
                unknown = {node.module} - {f"transformers.{name}" for name in MODULES}
                unknown = unknown if parts[0] == "transformers" else set()
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                unknown = {node.attr} - NAMES - MODULES
                unknown = unknown if node.value.id == "transformers" else set()
            else:
                continue
            assert not unknown, f"{path}, line {node.lineno}: {unknown}"
