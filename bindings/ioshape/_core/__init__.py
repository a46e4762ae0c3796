# SPDX-License-Identifier: Apache-2.0
"""Foundations that all other packages of ioshape import."""
