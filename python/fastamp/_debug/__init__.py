# SPDX-License-Identifier: Apache-2.0
"""Tools that find out what mixed precision did: check, inspect, bisect, trace."""
