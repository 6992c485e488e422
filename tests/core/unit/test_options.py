"""Values are checked by their annotations, and classes are named by a table or
``package.module:Name``.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import pytest
from pydantic import Field

from rewards.options import Count, Size, check_fields, check_values, load_target

Pool = Literal["mean", "max"]


@dataclass
class Shape:
    width: Size
    heads: Size | None = None
    pool: Pool = "mean"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("width", 0),
        ("width", True),
        ("heads", 0),
        ("pool", "median"),
        ("dropout", 1),
        ("dropout", float("nan")),
    ],
)
def test_a_field_of_another_type_choice_or_range_is_named(field, value):
    check_fields(Shape(width=8, heads=2))
    with pytest.raises(ValueError, match=rf"^{field} is "):
        check_fields(Shape(**{"width": 8, field: value}))


def test_arguments_are_checked_alike():
    check_values(Count | None, distractors=None, k=3)
    check_values(Annotated[float, Field(gt=0)], w=np.float64(2.5))
    with pytest.raises(ValueError, match=r"^w is "):
        check_values(Count, w=0)


def test_targets_are_found_in_a_table_or_a_module_and_others_are_named():
    table = {"cider": "rewards.text.cider:CiderD"}
    assert load_target("cider", "reward", table) is load_target(
        "rewards.text.cider:CiderD", "reward", table
    )
    for name in (
        "cidr",
        "no_such_module:A",
        "rewards.text.cider:Missing",
        ".cider:A",
    ):
        with pytest.raises(KeyError, match=rf"reward is '{name}'"):
            load_target(name, "reward", table, error=KeyError)
