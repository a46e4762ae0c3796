# SPDX-License-Identifier: Apache-2.0
"""Copies of checkpoints outside of the filesystem: object stores, and archives of Lustre."""
