/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the save floor: files that are read. */
#ifndef SAVE_LOAD_H
#define SAVE_LOAD_H

#include "save/save.h"

struct ioshape_reader {
	struct ioshape_context *context;
	struct zip_reader zip;
	struct ioshape_reader_options options;
	struct base_error error; /* of the last call that failed */
	struct base_error
		beside; /* why the file beside it tells no checksums; none: it is absent */
	struct ring_stream *stream; /* of calls that read onward; made at the first */
	struct ring_lane *lane;     /* the stream's, while something is read ahead */
	bool is_expecting;          /* what is read ahead is for records that will be loaded */
	struct base_fresh *fresh;   /* that a call reads into, during it */
	size_t expected;            /* stretches of fresh memory that huge pages were asked for */
	pid_t owner;
};

/* First in every call that can fail. Forgets the last failure. */
int save_reader_enter(struct ioshape_reader *reader);
/* Last in every call that can fail. */
int save_reader_leave(struct ioshape_reader *reader, const char *operation, int code);

/* Without the index, which is bookkeeping of the container. */
uint64_t save_reader_records(const struct ioshape_reader *reader);

int save_reader_read(struct ioshape_reader *reader, const struct zip_range *ranges, size_t count,
		     bool verify);

#endif
