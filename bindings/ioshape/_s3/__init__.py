# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on object stores: to them, and back. Imported only by ioshape.s3."""
