# SPDX-License-Identifier: Apache-2.0
"""Regions: fastamp.autocast, custom_fwd and custom_bwd, TorchScript."""
