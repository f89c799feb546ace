# SPDX-License-Identifier: Apache-2.0
"""Linear layers in fp8: see docs/float8.md."""

from __future__ import annotations

from fastamp._float8.plan import Float8Plan as Plan
from fastamp._float8.plan import Float8PlanRow as PlanRow
from fastamp._float8.plan import float8_plan as plan
from fastamp._float8.recipe import Float8Recipe as Recipe
from fastamp._float8.recipe import float8_exclude as exclude
from fastamp._float8.recipe import float8_recipe as recipe
from fastamp._util.publish import publish

__all__ = [
    "Plan",
    "PlanRow",
    "Recipe",
    "exclude",
    "plan",
    "recipe",
]

publish(__name__, globals())
