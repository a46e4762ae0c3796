# SPDX-License-Identifier: Apache-2.0
"""Replacement of torch.save and torch.load, in this process and below "ioshape run"."""
