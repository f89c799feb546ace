"""``python -m fastamp``."""

from fastamp._cli import main

if __name__ == "__main__":
    main()
