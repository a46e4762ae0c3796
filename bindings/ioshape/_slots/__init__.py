# SPDX-License-Identifier: Apache-2.0
"""Coordinate writers: slots of pools, and the operator's view of them."""
