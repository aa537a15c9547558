"""Entry point of `python -m trl_multinode.doctor FILE`."""

import sys

from .report import main

if __name__ == "__main__":
    sys.exit(main())
