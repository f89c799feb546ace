# SPDX-License-Identifier: Apache-2.0
import torch

import fastamp


def test_build_info_names_the_torch_it_was_built_with():
    info = fastamp.build_info()
    assert info["torch_version"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert fastamp.__version__ == info["version"]
