# SPDX-License-Identifier: Apache-2.0
"""Tensors of a GPU, or of another device with memory of its own, to and from files."""
