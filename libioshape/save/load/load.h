/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the save floor: files that are read. */
#ifndef SAVE_LOAD_H
#define SAVE_LOAD_H

#include "save/save.h"

/* A file in whatever format, as reader_options.any_format has it. */
int save_open_any_format(struct zip_reader *reader, const char *path,
			 const struct ioshape_reader_options *options, enum ioshape_direct direct,
			 struct base_error *error);

#endif
