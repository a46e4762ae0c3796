# SPDX-License-Identifier: Apache-2.0
"""Parsers of file formats: pickles, safetensors headers and names of DCP. None opens a file."""
