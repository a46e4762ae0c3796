# SPDX-License-Identifier: Apache-2.0
"""Loading: from files to objects and tensors, and lists of what a file contains."""
