# SPDX-License-Identifier: Apache-2.0
"""Check descriptions of the packages: recipes, manifests, bill of materials, binary interface."""

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from .launch_root import PACKAGING, ROOT, LaunchError, Workplace, run


def checks(work: Workplace) -> Path:
    """Return a Python with the tools that check recipes and manifests."""
    folder = ROOT / "build" / "launch-checks"
    wanted = (PACKAGING / "checks.txt").read_text(encoding="utf-8")
    stamp = folder / "complete"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        work.say("installing what recipes are checked with")
        run(sys.executable, "-m", "venv", "--clear", folder)
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(folder / "bin" / "python", *install, "-r", PACKAGING / "checks.txt")
        stamp.write_text(wanted, encoding="utf-8")
    return folder / "bin" / "python"


BOM = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
error = JsonStrictValidator(SchemaVersion.V1_5).validate_str(sys.stdin.read())
sys.exit(f"{error!r}" if error else 0)
"""


def bill_of_materials(work: Workplace) -> None:
    made = next(work.folder.glob("wheel/*.whl"), None)
    if made is None:
        raise LaunchError("there is no wheel")
    for options in ([], [made]):
        bill = run(sys.executable, PACKAGING / "sbom.py", *options)
        done = subprocess.run(
            [checks(work), "-c", BOM], input=bill, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise LaunchError(f"CycloneDX does not take the bill of materials: {done.stderr}")
    if bill.count('"alg": "SHA-256"') != 3:
        raise LaunchError("the wheel's bill of materials does not have its three libraries")


def kubernetes(work: Workplace) -> None:
    tool = checks(work).parent / "kubernetes-validate"
    examples = ROOT / "examples"
    names = (
        "deploy/kubernetes.yaml",
        "kubernetes_group.yaml",
        "kubernetes_preload.yaml",
        "kubernetes_tier.yaml",
    )
    files = [examples / name for name in names]
    for version in ("1.30.0", "1.33.0"):
        run(tool, "--strict", "--kubernetes-version", version, *files)


EASYBUILD = """
import sys
from easybuild.tools.options import set_up_configuration
set_up_configuration(args=["--allow-use-as-root-and-accept-consequences"], silent=True)
from easybuild.framework.easyconfig.parser import EasyConfigParser
from easybuild.framework.easyconfig.style import check_easyconfigs_style
if check_easyconfigs_style([sys.argv[1]]):
    sys.exit("its style is wrong")
assert EasyConfigParser(sys.argv[1]).get_config_dict()["checksums"]
"""

CONDA = """
import sys
from rattler_build import Stage0Recipe, VariantConfig
known = VariantConfig({
    "c_compiler": ["gcc"], "c_compiler_version": ["13"],
    "c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"], "python": ["3.12.* *_cpython"],
})
made = Stage0Recipe.from_file(sys.argv[1]).render(known)
assert [one.recipe.package.name for one in made] == ["libioshape", "ioshape"], made
"""


def recipes(work: Workplace) -> None:
    """Check the recipes with tools from PyPI. Spack has none there: only compile its recipe."""
    made, filled = work.archive(), work.folder / "recipes"
    url = f"https://example.org/{made.name}"
    run(PACKAGING / "recipes.sh", made, url, "https://example.org", filled)
    (file,) = (filled / "easybuild").iterdir()
    run(checks(work), "-c", EASYBUILD, file)
    run(checks(work), "-c", CONDA, filled / "conda" / "recipe.yaml")
    run(checks(work), "-m", "py_compile", filled / "spack" / "packages" / "ioshape" / "package.py")


def meson_dist(work: Workplace) -> None:
    """Run `meson dist` in a new repository, as a release does."""
    tree = work.folder / "dist-tree"
    shutil.copytree(work.sources, tree)
    git = ("git", "-c", "user.name=bench", "-c", "user.email=bench@localhost")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all", "--no-gpg-sign"]):
        run(*git, *words, folder=tree)
    run("meson", "setup", "build/dist", folder=tree)
    run("meson", "dist", "-C", "build/dist", "--no-tests", folder=tree)
    (made,) = (tree / "build" / "dist" / "meson-dist").glob("*.tar.xz")
    with tarfile.open(made) as opened:
        if not any(name.endswith("/bindings/packaging/deb.sh") for name in opened.getnames()):
            raise LaunchError(f"{made} lacks the packaging")


def binary_interface(work: Workplace) -> None:
    """Compare the binary interface with the last tag, or without a tag with the base of 0.2."""
    tags = run("git", "tag").split()
    first = run("git", "log", "-S## [0.2.0]", "--format=%h", "--reverse", "--", "CHANGELOG.md")
    base = [] if tags else [f"{first.split()[0]}^"]
    work.say(run(PACKAGING / "abi.sh", *base).splitlines()[-1])


DESCRIPTIONS: dict[str, Callable[[Workplace], None]] = {
    "bill of materials": bill_of_materials,
    "Kubernetes": kubernetes,
    "recipes": recipes,
    "meson dist": meson_dist,
    "binary interface": binary_interface,
}
