# SPDX-License-Identifier: Apache-2.0
"""Lightning's checkpoints, written and read by us."""
