# SPDX-License-Identifier: Apache-2.0
"""Make other packages save and load checkpoints through ioshape.

"ioshape run" calls an integration when a module of its package has been imported. The entry points
of the group "ioshape.integrations" name the modules; other distributions may add entry points. In
ioshape, only ioshape.patch() and the public modules of the same names import this package.
"""
