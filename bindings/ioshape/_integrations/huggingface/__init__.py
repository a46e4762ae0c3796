# SPDX-License-Identifier: Apache-2.0
"""Directories of Hugging Face's packages, written as a whole."""
