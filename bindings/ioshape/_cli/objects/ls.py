# SPDX-License-Identifier: Apache-2.0
"""What "ioshape ls" says of object stores."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ioshape._cli.objects.shared import s3
from ioshape._cli.output import Table, columns, human_size, say, say_json

if TYPE_CHECKING:
    from ioshape.s3 import Remote


def show(url: str, endpoint: str | None, as_json: bool) -> int:
    """The complete checkpoints below a URL."""
    found: list[Remote] = s3().checkpoints(url, endpoint=endpoint)
    if as_json:
        checkpoints = []
        for one in found:
            fields = asdict(one) | {"bytes": one.n_bytes, "uploaded": one.uploaded.isoformat()}
            del fields["n_bytes"]
            checkpoints.append(fields)
        say_json({"url": url, "checkpoints": checkpoints})
        return 0
    if not found:
        say(f"There is no complete checkpoint below {url}.")
        return 0
    table = Table(*columns("<url", "<uploaded", "<kind", ">files", ">size"))
    for one in found:
        uploaded = f"{one.uploaded.astimezone():%Y-%m-%d %H:%M:%S}"
        table.add(one.url, uploaded, one.kind, str(one.files), human_size(one.n_bytes))
    table.show()
    return 0
