# SPDX-License-Identifier: Apache-2.0
"""ioshape upload, ioshape download, and what "ioshape ls" says of object stores."""
