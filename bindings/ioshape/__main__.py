# SPDX-License-Identifier: Apache-2.0
"""python -m ioshape: the command line, also for "torchrun -m ioshape run train.py"."""

from ioshape._cli import main

if __name__ == "__main__":
    main()
