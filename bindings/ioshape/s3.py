# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on object stores: S3, and whatever speaks its protocol.

    from ioshape import s3

    s3.upload("checkpoints/step-0000001000", "s3://bucket/run/")
    s3.download("s3://bucket/run/step-0000001000", "checkpoints/")

A checkpoint is there only when all of it is. Needs the package boto3: pip install 'ioshape[s3]'.
Credentials and the server come from its variables and files. The commands "ioshape upload" and
"ioshape download" do the same.
"""

from __future__ import annotations

import ioshape._remote.client  # noqa: F401 - before all, for its sentence about a missing package
from ioshape._remote.download import Downloaded, download
from ioshape._remote.look import Remote, checkpoints
from ioshape._remote.upload import Uploaded, upload

__all__ = ["Downloaded", "Remote", "Uploaded", "checkpoints", "download", "upload"]
