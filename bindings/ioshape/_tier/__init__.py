# SPDX-License-Identifier: Apache-2.0
"""Saves on a fast disk of the node, and how they come to where they belong."""
