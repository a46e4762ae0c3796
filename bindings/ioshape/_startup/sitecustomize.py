# SPDX-License-Identifier: Apache-2.0
"""Runs when a Python starts below "ioshape run", which puts this folder first in PYTHONPATH.

Any Python may meet this file, also an old one that is no business of ours: nothing here is newer
than it could read, and nothing may go wrong.
"""

import os
import sys
from importlib import import_module

_folder = os.path.dirname(__file__)  # noqa: PTH120 - pathlib would be the slowest part of this

try:
    if os.environ.get("IOSHAPE_RUN", "0") != "0" and sys.version_info >= (3, 10):
        import_module("_ioshape_hook").install()
except Exception as error:
    sys.stderr.write("ioshape: torch.save stays torch's own in process %d: %s\n" % (os.getpid(), error))  # noqa: E501, UP031

# From here on it is as if this folder had not been there: the program sees its own sys.path, and
# the sitecustomize that this one hides has its turn. What goes wrong in that one is raised, for
# Python to report as ever.
if _folder in sys.path:
    sys.path[:] = [entry for entry in sys.path if entry != _folder]
    _this = sys.modules.pop(__name__)
    try:
        import_module(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = _this
