# SPDX-License-Identifier: Apache-2.0
"""What files look like inside."""
