# SPDX-License-Identifier: Apache-2.0
"""What torch.compile, torch.export and recomputation have to know of this thread's state."""
