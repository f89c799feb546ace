# SPDX-License-Identifier: Apache-2.0
"""Policies of ops and modules: see docs/policies.md.

Of the process (``set``, ``preset``), of a block of code (``override``), of modules of a model
(``for_modules``, ``fp32``), and as files (``load``, ``save``).
"""

from __future__ import annotations

from fastamp._policy.module_policies import ModulePolicies, for_modules
from fastamp._policy.module_regions import fp32
from fastamp._policy.op_policies import override
from fastamp._policy.policy_file import ModuleValue, OpValues, PolicyFile, load, save
from fastamp._policy.presets import Preset, copy_from, preset
from fastamp._policy.table import OpTableRow, register_op, unregister_op
from fastamp._policy.table import op_policy as get
from fastamp._policy.table import op_table as table
from fastamp._policy.table import reset_op_policies as reset
from fastamp._policy.table import set_op_policy as set
from fastamp._util.publish import publish

__all__ = [
    "ModulePolicies",
    "ModuleValue",
    "OpTableRow",
    "OpValues",
    "PolicyFile",
    "Preset",
    "copy_from",
    "for_modules",
    "fp32",
    "get",
    "load",
    "override",
    "preset",
    "register_op",
    "reset",
    "save",
    "set",
    "table",
    "unregister_op",
]

publish(__name__, globals())
