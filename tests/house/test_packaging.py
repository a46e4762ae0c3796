# SPDX-License-Identifier: Apache-2.0
"""Test that recipes require what the build requires, and that the bill of materials lists it."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tree import LIBRARY, ROOT

PACKAGING = ROOT / "bindings" / "packaging"

#: Names in meson, and the names of Debian, conda-forge, Spack and EasyBuild.
NAMES = {
    "liburing": ("liburing-dev", "liburing", "liburing", "liburing"),
    "libisal": ("libisal-dev", "isa-l", "isa-l", "isa-l"),
    "hiredis": ("libhiredis-dev", "hiredis", "hiredis", "hiredis"),
}


def wanted() -> dict[str, str]:
    """Return the oldest version of each library that the build requires."""
    text = (LIBRARY / "meson.build").read_text(encoding="utf-8")
    asked = r"dependency\('(\w+)', version: '>=([\d.]+)', not_found_message: missing_headers\)"
    return dict(re.findall(asked, text))


def test_a_build_without_headers_says_what_the_readme_says() -> None:
    text = (LIBRARY / "meson.build").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for tool in ("apt-get", "dnf"):
        (line,) = re.findall(rf"^    ({tool} install gcc .*)$", readme, re.MULTILINE)
        assert f"'{line}'" in text


def read(name: str) -> str:
    return (PACKAGING / name).read_text(encoding="utf-8")


def test_there_is_a_name_for_each_library() -> None:
    assert set(wanted()) == set(NAMES)


@pytest.mark.parametrize("library", NAMES)
def test_recipes_ask_for_what_the_build_asks_for(library: str) -> None:
    debian, conda, spack, easybuild = NAMES[library]
    oldest = wanted()[library]
    # Debian 12, the oldest supported release, has a new enough hiredis.
    bound = "" if library == "hiredis" else rf" \(>= {oldest}\)"
    assert re.search(rf"^ {debian}{bound},$", read("debian/control"), re.MULTILINE)
    recipe = read("conda/recipe.yaml")
    assert recipe.count(f"{conda} >={oldest}") == 2  # once for C, once for Python
    assert f'depends_on("{spack}@{oldest}:")' in read("spack/package.py")
    assert f"('{easybuild}', '" in read("easybuild/ioshape-GCCcore-13.3.0.eb")


def test_the_package_of_the_library_is_called_after_its_soname() -> None:
    build = (ROOT / "meson.build").read_text(encoding="utf-8")
    found = re.search(r"^soname_version = '(\d+)'", build, re.MULTILINE)
    assert found
    package = f"libioshape{found[1]}"
    assert f"\nPackage: {package}\n" in read("debian/control")
    assert (PACKAGING / "debian" / f"{package}.install").is_file()
    symbols = read(f"debian/{package}.symbols")
    assert symbols.startswith(f"libioshape.so.{found[1]} {package} ")
    assert f"(symver)IOSHAPE_{found[1]} " in symbols


# ---- Files that packages and images exclude -----------------------------------------------------


def entries(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").split("\n\n", maxsplit=1)[0].splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_what_git_ignores_stays_out_of_packages_and_images() -> None:
    """Compare them with the first block of .gitignore, which has build results and secrets."""
    ignored = {
        entry.strip("/") if entry.startswith("/") else f"**/{entry.strip('/')}"
        for entry in entries(".gitignore")
    }
    assert {"build", "**/secrets", "**/secrets.??????"} <= ignored
    assert {*entries(".dockerignore")} == {".git", *ignored}
    found = re.search(
        r"\tfind \. \\\((.*?)\\\) -prune -o -type f -print0", read("deb.sh"), re.DOTALL
    )
    assert found
    words = [word for word in shlex.split(found[1].replace("\\\n", " ")) if word != "-o"]
    pruned = {
        name.removeprefix("./") if how == "-path" else f"**/{name}"
        for how, name in zip(words[::2], words[1::2], strict=True)
    }
    assert pruned == ignored


#: Replaces dpkg-buildpackage, which builds for minutes. It keeps the files that it was given.
DPKG_BUILDPACKAGE = """#!/bin/sh
cp -r . "$KEPT"
touch ../x.deb ../x.dsc ../x.tar.xz ../x.changes ../x.buildinfo
"""


def test_an_archive_with_secrets_gives_a_package_without(tmp_path: Path) -> None:
    """Build a package without git, as in the image.

    Also check special characters in the maintainer.
    """
    archive, programs, kept = tmp_path / "archive", tmp_path / "programs", tmp_path / "kept"
    archive.mkdir()
    shutil.copy(ROOT / "meson.build", archive)
    for folder in ("bindings/packaging", "examples/deploy"):
        shutil.copytree(ROOT / folder, archive / folder)
    for name in ("secrets", "examples/deploy/secrets", "examples/deploy/secrets.a1B2c3", "build"):
        (archive / name).mkdir()
        (archive / name / "server.key").write_text("secret")
    programs.mkdir()
    (programs / "dpkg-buildpackage").write_text(DPKG_BUILDPACKAGE)
    (programs / "dpkg-buildpackage").chmod(0o755)
    ours = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "KEPT": str(kept),
        "SOURCE_DATE_EPOCH": "1700000000",
        "DEBFULLNAME": r"A/B & C\D",
        "DEBEMAIL": "a@b.invalid",
    }
    script = archive / "bindings" / "packaging" / "deb.sh"
    subprocess.run([script, tmp_path / "out"], check=True, env={**os.environ, **ours})
    assert not [*kept.rglob("server.key")]
    assert (kept / "examples" / "deploy" / "secrets.sh").is_file()
    control = (kept / "debian" / "control").read_text(encoding="utf-8")
    assert "Maintainer: A/B & C\\D <a@b.invalid>\n" in control


reads_toml = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="its reader of TOML came with Python 3.11"
)


def bill(*wheel: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, PACKAGING / "sbom.py", *wheel], check=True, capture_output=True, text=True
    )
    components: list[dict[str, Any]] = json.loads(done.stdout)["components"]
    return components


@reads_toml
def test_the_bill_of_materials_lists_what_is_asked_for() -> None:
    listed = {one["name"]: one["scope"] for one in bill()}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    assert needed
    names = re.findall(r'"([\w-]+)', needed[1])
    assert {name for name, scope in listed.items() if scope == "required"} == {*wanted(), *names}
    assert {"torch", "openssl", "prometheus-client"} <= set(listed)


@reads_toml
def test_the_bill_of_a_wheel_lists_the_libraries_that_it_carries(tmp_path: Path) -> None:
    wheel = tmp_path / "ioshape.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("ioshape.libs/", b"")  # auditwheel adds entries for folders
        made.writestr("ioshape.libs/libisal-1.so", b"library")
        made.writestr("ioshape/__init__.py", b"")
    more = [one for one in bill(wheel) if one not in bill()]
    assert [one["name"] for one in more] == ["libisal-1.so"]
    content = hashlib.sha256(b"library").hexdigest()
    assert more[0]["hashes"] == [{"alg": "SHA-256", "content": content}]
