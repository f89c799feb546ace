# SPDX-License-Identifier: Apache-2.0
# isort: skip_file
# Names of fastamp come first: a later star import leaves them.
from fastamp._autocast.region import autocast as autocast
from fastamp._scaler.grad_scaler import GradScaler as GradScaler
from fastamp.torch import amp as amp
from fastamp.torch import cpu as cpu
from fastamp.torch import cuda as cuda
from fastamp.torch import nn as nn

from torch import *  # type: ignore[assignment]
from torch import (
    _C as _C,
)
from torch import __version__ as __version__
from torch import (
    accelerator as accelerator,
)
from torch import (
    autograd as autograd,
)
from torch import (
    backends as backends,
)
from torch import (
    compiler as compiler,
)
from torch import (
    distributed as distributed,
)
from torch import (
    distributions as distributions,
)
from torch import (
    export as export,
)
from torch import (
    fft as fft,
)
from torch import (
    func as func,
)
from torch import (
    fx as fx,
)
from torch import (
    hub as hub,
)
from torch import (
    jit as jit,
)
from torch import (
    library as library,
)
from torch import (
    linalg as linalg,
)
from torch import (
    mps as mps,
)
from torch import (
    multiprocessing as multiprocessing,
)
from torch import (
    nested as nested,
)
from torch import (
    ops as ops,
)
from torch import (
    optim as optim,
)
from torch import (
    overrides as overrides,
)
from torch import (
    profiler as profiler,
)
from torch import (
    random as random,
)
from torch import (
    sparse as sparse,
)
from torch import (
    special as special,
)
from torch import (
    testing as testing,
)
from torch import (
    utils as utils,
)
from torch import (
    version as version,
)
from torch import (
    xpu as xpu,
)
from torch._C import *
from torch._C._VariableFunctions import *  # type: ignore[assignment]
