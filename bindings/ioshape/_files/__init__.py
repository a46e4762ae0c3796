# SPDX-License-Identifier: Apache-2.0
"""Files and directories in any format: ioshape.open() and ioshape.directory()."""
