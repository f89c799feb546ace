# SPDX-License-Identifier: Apache-2.0
"""Casts of weights that outlive a region, or are made together."""
