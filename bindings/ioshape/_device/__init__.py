# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors between files and devices with memory of their own, such as GPUs."""
