# SPDX-License-Identifier: Apache-2.0
"""Make directories of Hugging Face packages appear as a whole."""
