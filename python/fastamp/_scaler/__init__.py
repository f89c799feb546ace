# SPDX-License-Identifier: Apache-2.0
"""The parts of ``fastamp.GradScaler`` that are not the class: checks, reports, subclasses."""
