# SPDX-License-Identifier: Apache-2.0
"""Files in anybody's format: ioshape.open()."""
