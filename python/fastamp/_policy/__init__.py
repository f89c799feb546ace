# SPDX-License-Identifier: Apache-2.0
"""Policies of ops and modules: the op table, blocks, presets, files."""
