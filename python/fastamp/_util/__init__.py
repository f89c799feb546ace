# SPDX-License-Identifier: Apache-2.0
"""Helpers that several packages use and belong to none of them; the native part's loader."""
