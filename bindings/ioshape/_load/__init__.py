# SPDX-License-Identifier: Apache-2.0
"""Reading files: into objects, and what lies in them."""
