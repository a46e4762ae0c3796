# SPDX-License-Identifier: Apache-2.0
"""Other packages that write checkpoints, through us.

Under "ioshape run" each is called when a module of its package has been imported: the entry points
of the group "ioshape.integrations" say which. Anybody's package may have such entry points. Nothing
else of ours imports these, but ioshape.patch() and the public modules of the same names.
"""
