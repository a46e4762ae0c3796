# SPDX-License-Identifier: Apache-2.0
"""Entry point of "python -m ioshape", which "torchrun -m ioshape run train.py" uses, too."""

from ioshape._cli import main

if __name__ == "__main__":
    main()
