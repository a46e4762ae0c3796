# SPDX-License-Identifier: Apache-2.0
"""Commands about directories that save_group() was given: ls, extract, prune."""
