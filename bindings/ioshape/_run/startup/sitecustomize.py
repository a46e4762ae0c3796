# SPDX-License-Identifier: Apache-2.0
"""Install the import hook. Each Python process below "ioshape run" runs this file at its start.

"ioshape run" puts this folder first in PYTHONPATH. An old Python may also run this file, so it uses
no new syntax. No error here may stop the program.
"""

import os
import sys

_folder = os.path.dirname(__file__)  # noqa: PTH120 - pathlib would take longer than all of this

try:
    if os.environ.get("IOSHAPE_RUN", "0") != "0" and sys.version_info >= (3, 10):
        # Not "import": the folder is no package, and importlib may not have been loaded yet.
        __import__("_ioshape_hook").install()
except Exception as error:
    sys.stderr.write("ioshape: torch.save was not replaced: " + repr(error) + "\n")

# The program must see its own sys.path, and the sitecustomize that this file hides must run. Python
# reports what that module raises.
if _folder in sys.path:
    sys.path[:] = [entry for entry in sys.path if entry != _folder]
    _this = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if getattr(error, "name", __name__) != __name__:
            raise
        sys.modules[__name__] = _this
