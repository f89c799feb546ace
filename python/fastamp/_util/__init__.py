# SPDX-License-Identifier: Apache-2.0
"""What several packages use and belongs to none of them; and what finds the native part."""
