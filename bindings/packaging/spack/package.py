# SPDX-License-Identifier: Apache-2.0
"""Recipe for Spack, to be placed at packages/ioshape/package.py of a repository.

bindings/packaging/recipes.sh fills in the names between @.
"""

from spack.package import *


class Ioshape(MesonPackage):
    """Durable, atomic checkpoints of training jobs at the speed of the storage. Writers of all
    jobs take turns. It builds the C library, and with +python the Python package ioshape."""

    homepage = "@HOMEPAGE@"
    url = "@URL@"
    license("Apache-2.0")

    version("@VERSION@", sha256="@SHA256@")

    variant("mpi", default=False, description="Build libioshape-mpi")
    variant("python", default=True, description="Build the Python package")
    variant("tls", default=True, description="TLS to the coordinator")

    depends_on("c", type="build")
    depends_on("meson@1.0.1:", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("hiredis@0.14:")
    depends_on("hiredis@1.0: +ssl", when="+tls")
    depends_on("isa-l@2.30:")
    depends_on("liburing@2.3:")
    depends_on("mpi@3:", when="+mpi")
    depends_on("openssl@1.1.1:", when="+tls")

    extends("python@3.10:", when="+python")
    depends_on("py-cffi@1.15:", type=("build", "run"), when="+python")
    depends_on("py-click@8.1:", type="run", when="+python")
    depends_on("py-rich@13:", type="run", when="+python")

    def meson_args(self):
        args = [f"-Dmpi={'enabled' if self.spec.satisfies('+mpi') else 'disabled'}"]
        if self.spec.satisfies("+python"):
            args += ["-Dbindings=true", f"-Dpython.platlibdir={python_platlib}"]
        return args
