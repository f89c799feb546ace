# SPDX-License-Identifier: Apache-2.0
"""fastamp in place of torch.amp in programs that are not changed."""
