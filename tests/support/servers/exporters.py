# SPDX-License-Identifier: Apache-2.0
"""The command `ioshape exporter`, and the metrics that it serves."""

import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command import IOSHAPE
from processes import TIMEOUT_S, environment

#: lifetime of cached answers
_CACHE_S = 1.0


class Exporter:
    """The command, on a free port."""

    def __init__(self, *options: str | Path, **variables: str) -> None:
        self.process = subprocess.Popen(
            [IOSHAPE, "exporter", "--port", "0", *options],
            env=environment(**variables),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        match = re.fullmatch(r"metrics are at (http://127\.0\.0\.1:(\d+)/metrics)\n", line)
        assert match, line
        self.url = match[1]
        self.address = ("127.0.0.1", int(match[2]))

    def scrape(self) -> dict[str, float]:
        """Return each sample by its name with labels."""
        with urllib.request.urlopen(self.url, timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def scrape_anew(self) -> dict[str, float]:
        """Return samples that are not from the cache."""
        time.sleep(_CACHE_S)
        return self.scrape()

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def exporter(*options: str | Path, **variables: str) -> Iterator[Exporter]:
    """Start an exporter, and kill it at the end."""
    one = Exporter(*options, **variables)
    try:
        yield one
    finally:
        one.close()
