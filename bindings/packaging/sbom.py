#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the bill of materials as CycloneDX JSON, read from meson.build and pyproject.toml.

    sbom.py [WHEEL]

Without a wheel it lists the dependencies of the sources. With a wheel it also lists the libraries
that the wheel contains, with their checksums. The output depends on these inputs only.
"""

import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[2]
DEPENDENCY = re.compile(
    r"dependency\('(?P<name>[\w-]+)'(?:, version: '(?P<version>[^']+)')?(?P<rest>[^)]*)\)"
)
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<version>[^;]*)")
# License of each C library, by its name in meson. Libraries of the system itself are not listed.
C_LIBRARIES = {
    "liburing": "MIT",
    "libisal": "BSD-3-Clause",
    "hiredis": "BSD-3-Clause",
    "hiredis_ssl": "BSD-3-Clause",
    "openssl": "Apache-2.0",
}
SYSTEM = {"threads"}

Component = dict[str, Any]


def version() -> str:
    text = (ROOT / "meson.build").read_text(encoding="utf-8")
    found = re.search(r"^\tversion: '([\d.]+)'", text, re.MULTILINE)
    assert found, "meson.build tells no version"
    return found[1]


def component(name: str, wanted: str, *, required: bool, purl: str, **more: Any) -> Component:
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "purl": purl,
        "scope": "required" if required else "optional",
        **({"properties": [{"name": "ioshape:wanted", "value": wanted}]} if wanted else {}),
        **more,
    }


def c_libraries() -> list[Component]:
    text = (ROOT / "libioshape" / "meson.build").read_text(encoding="utf-8")
    found = []
    for one in DEPENDENCY.finditer(text):
        name = one["name"]
        if name not in SYSTEM:
            license_id = C_LIBRARIES[name]  # KeyError for a new library: add its license
            found.append(
                component(
                    name,
                    one["version"] or "",
                    required="required: false" not in one["rest"],
                    purl=f"pkg:generic/{name}",
                    licenses=[{"license": {"id": license_id}}],
                )
            )
    return found


def python_packages() -> list[Component]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    wanted = dict.fromkeys(project["dependencies"], True)
    for extra in project["optional-dependencies"].values():
        wanted |= {one: False for one in extra if one not in wanted}
    found = []
    for text, required in wanted.items():
        one = REQUIREMENT.match(text)
        assert one, text
        name = one["name"]
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}"
        found.append(component(name, one["version"].strip(), required=required, purl=purl))
    return found


def carried(wheel: Path) -> list[Component]:
    found = []
    with zipfile.ZipFile(wheel) as opened:
        for name in sorted(opened.namelist()):
            if name.startswith("ioshape.libs/") and not name.endswith("/"):
                checksum = hashlib.sha256(opened.read(name)).hexdigest()
                file = name.removeprefix("ioshape.libs/")
                purl = f"pkg:generic/{file}"
                hashes = [{"alg": "SHA-256", "content": checksum}]
                found.append(component(file, "", required=True, purl=purl, hashes=hashes))
    return found


def main() -> None:
    components = [*c_libraries(), *python_packages()]
    if len(sys.argv) > 1:
        components += carried(Path(sys.argv[1]))
    ours = f"pkg:pypi/ioshape@{version()}"
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": ours,
                "name": "ioshape",
                "version": version(),
                "purl": ours,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": ours, "dependsOn": [one["bom-ref"] for one in components]}],
    }
    print(json.dumps(bom, indent=1))


main()
