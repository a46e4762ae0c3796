# SPDX-License-Identifier: Apache-2.0
"""From an object to the records that C writes; saves under way and what they did."""
