# SPDX-License-Identifier: Apache-2.0
"""Sees what a program runs, op by op."""
