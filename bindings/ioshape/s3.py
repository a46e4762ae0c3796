# SPDX-License-Identifier: Apache-2.0
"""Upload and download of checkpoints to and from object stores that speak the S3 protocol.

Example:

    from ioshape import s3

    s3.upload("checkpoints/step-0000001000", "s3://bucket/run/")
    s3.download("s3://bucket/run/step-0000001000", "checkpoints/")

A checkpoint becomes visible only when all of it is uploaded. This module needs the package boto3:
pip install 'ioshape[s3]'. Credentials and the server come from boto3's variables and files. The
commands "ioshape upload" and "ioshape download" use this module.
"""

from __future__ import annotations

import ioshape._remote.client  # noqa: F401 - first, for its error message if boto3 is missing
from ioshape._remote.download import Downloaded, Remote, checkpoints, download
from ioshape._remote.upload import Uploaded, upload

__all__ = ["Downloaded", "Remote", "Uploaded", "checkpoints", "download", "upload"]
