# SPDX-License-Identifier: Apache-2.0
"""Save and load safetensors files through ioshape."""
