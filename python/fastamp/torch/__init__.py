# SPDX-License-Identifier: Apache-2.0
"""torch, with fastamp's mixed precision in it: ``import fastamp.torch as torch``.

Everything is torch's own, the same objects, except the names that have to do with mixed precision.
The modules that hold such names are mirrors of torch's; every other submodule is torch's.
"""

from fastamp._install.torch_mirrors import make_mirrors

make_mirrors(__name__)  # from here on, this module is a mirror
