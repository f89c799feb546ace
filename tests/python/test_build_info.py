# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import torch

import fastamp


def test_build_info_names_the_torch_it_was_built_with():
    info = fastamp.build_info()
    assert info["torch_version"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert fastamp.__version__ == info["version"]


def test_the_file_beside_the_module_says_the_same():
    """Tools read it without loading the module: the loader, the wheel's bill of materials."""
    file = Path(fastamp._C.__file__).with_name("build_info.json")
    facts, info = json.loads(file.read_text(encoding="utf-8")), fastamp.build_info()
    assert facts["compiler"].split()[0].isalpha()
    for name in ("version", "torch_version", "compiler"):
        assert facts[name] == info[name]
