# SPDX-License-Identifier: Apache-2.0
"""State of this thread that torch.compile, torch.export and recomputation have to carry."""
