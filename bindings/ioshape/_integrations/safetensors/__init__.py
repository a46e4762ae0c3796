# SPDX-License-Identifier: Apache-2.0
"""safetensors: saves through the library, and loads."""
