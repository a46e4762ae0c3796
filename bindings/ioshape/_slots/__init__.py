# SPDX-License-Identifier: Apache-2.0
"""The right to write now."""
