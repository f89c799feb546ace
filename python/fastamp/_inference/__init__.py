# SPDX-License-Identifier: Apache-2.0
"""Models that leave training in the precision of their regions: converted, exported."""
