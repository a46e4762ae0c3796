# SPDX-License-Identifier: Apache-2.0
"""Runs when a Python starts below "ioshape run", which puts this folder first in PYTHONPATH.

Any Python may meet this file, also an old one that is no business of ours: nothing here is newer
than what that one reads. And nothing that goes wrong here may stop the program.
"""

import os
import sys

_folder = os.path.dirname(__file__)  # noqa: PTH120 - pathlib would take longer than all of this

try:
    if os.environ.get("IOSHAPE_RUN", "0") != "0" and sys.version_info >= (3, 10):
        # Not "import": the folder is no package, and importlib may not have been loaded yet.
        __import__("_ioshape_hook").install()
except Exception as error:
    sys.stderr.write("ioshape: torch.save stays torch's own: " + repr(error) + "\n")

# From here on it is as if this folder were not there: the program sees its own sys.path, and the
# sitecustomize that this one hides has its turn. What that one raises is Python's to report.
if _folder in sys.path:
    sys.path[:] = [entry for entry in sys.path if entry != _folder]
    _this = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if getattr(error, "name", __name__) != __name__:
            raise
        sys.modules[__name__] = _this
