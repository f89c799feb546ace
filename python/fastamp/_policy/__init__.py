# SPDX-License-Identifier: Apache-2.0
"""What autocast does with ops and modules: the op table, blocks, presets, files."""
