"""`python -m flows.cli`: the command `roll` where its console script is not on the PATH, such as in a container or a job."""

import sys

from flows.cli import main

if __name__ == "__main__":
    sys.exit(main())
