# SPDX-License-Identifier: Apache-2.0
"""fastamp beside torch.amp, measured in one process: ``python -m benchmarks --help``."""
