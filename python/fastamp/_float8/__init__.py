# SPDX-License-Identifier: Apache-2.0
"""Linear layers in fp8: recipes, exclusions, plans, compiled graphs."""
