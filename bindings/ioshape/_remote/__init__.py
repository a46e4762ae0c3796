# SPDX-License-Identifier: Apache-2.0
"""Copy checkpoints to object stores and back."""
