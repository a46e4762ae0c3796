# SPDX-License-Identifier: Apache-2.0
"""Run the frameworks' own test suites on ioshape and on the frameworks' own code."""
