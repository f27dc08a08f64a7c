"""`python -m runner.report`."""

import sys

from runner.report.command import main

if __name__ == "__main__":
    sys.exit(main())
