# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp``."""

from fastamp._cli import main

if __name__ == "__main__":
    main()
