"""Entry point of `python -m trl_multinode.tools`, for a clone that is not installed."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
