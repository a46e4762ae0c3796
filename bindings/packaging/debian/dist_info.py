# SPDX-License-Identifier: Apache-2.0
"""Writes the package's metadata for pip and importlib.metadata into a folder, from pyproject.toml.

The meson-python of Debian 12 cannot do it: it does not know the license fields of pyproject.toml.
"""

import re
import sys
from pathlib import Path

import tomllib


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    meson = Path("meson.build").read_text(encoding="utf-8")
    found = re.search(r"^\tversion: '([\d.]+)'", meson, re.MULTILINE)
    assert found, "meson.build tells no version"
    folder = Path(sys.argv[1]) / f"ioshape-{found[1]}.dist-info"
    folder.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        "Name: ioshape",
        f"Version: {found[1]}",
        f"Summary: {project['description']}",
        f"License: {project['license']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {one}" for one in project["dependencies"]),
    ]
    for extra, wanted in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {one}; extra == '{extra}'" for one in wanted]
    (folder / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    points = [
        line
        for group, named in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in named.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(points) + "\n", encoding="utf-8")
    (folder / "INSTALLER").write_text("debian\n", encoding="utf-8")


main()
