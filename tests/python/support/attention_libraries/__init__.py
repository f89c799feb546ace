# SPDX-License-Identifier: Apache-2.0
"""Libraries of attention as small as can be, for the CPU.

Names of modules, classes, arguments and ops, and the schemas of these, are those of the libraries;
so is what they refuse. The code is not theirs.
"""
