# SPDX-License-Identifier: Apache-2.0
"""The frameworks' own tests, run on us and on what the frameworks bring."""
