# SPDX-License-Identifier: Apache-2.0
"""Handles of settings that are in force from a call on, and can be ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Held"]


class Held:
    """A base of what such calls return: ended by ``release``, or by the end of a ``with`` block."""

    def release(self) -> None:
        """Ends it. Safe to call again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Returns the object; it is in force already."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends it."""
        self.release()
