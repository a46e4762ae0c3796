# SPDX-License-Identifier: Apache-2.0
"""Make the package safetensors save through ioshape, as a plug-in of pytest."""

import ioshape

ioshape.patch(safetensors=True)
