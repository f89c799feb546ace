# SPDX-License-Identifier: Apache-2.0
"""Records of a step, and where two of them part."""
