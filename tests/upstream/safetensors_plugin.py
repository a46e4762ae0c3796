# SPDX-License-Identifier: Apache-2.0
"""For pytest: what the package safetensors writes is written by us."""

import ioshape

ioshape.patch(safetensors=True)
