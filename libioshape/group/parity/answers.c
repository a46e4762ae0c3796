/* SPDX-License-Identifier: Apache-2.0 */
/* What the first rank of each node answers rank 0. */
#include "group/parity/parity.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct hearing {
	const struct ioshape_group *group;
	bool *have;
	struct group_answers *answers;
};

static int found_answer(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct hearing *hearing = user;
	struct group_answers *answers = hearing->answers;
	struct group_note_reader reader = group_read_note(note);
	struct base_error theirs = { 0 };
	char remark[BASE_ERROR_TEXT_BYTES];

	hearing->have[rank] = true;
	group_read_error(&reader, &theirs);
	group_read_text(&reader, remark, sizeof(remark));
	if (reader.bad)
		base_refuse(&theirs, -EPROTO, "cannot read what it answers");
	answers->count++;
	answers->same += theirs.code == -EEXIST;
	if (theirs.code && !answers->failure.code)
		group_fail_of_rank(hearing->group, rank, &theirs, &answers->failure);
	if (answers->remark && *remark && !*answers->remark)
		memcpy(answers->remark, remark, sizeof(remark));
	return 0;
}

int group_collect_answers(struct group_round *round, const char *what, const char *missing,
			  struct group_answers *answers, struct base_error *error)
{
	const struct ioshape_group *group = round->group;
	struct hearing hearing = { group, calloc(group->options.ranks, sizeof(bool)), answers };
	struct group_collection collection = {
		.what = what,
		.missing = missing,
		.have = hearing.have,
		.found = found_answer,
		.user = &hearing,
		.beats = true,
	};
	int ret;

	if (!hearing.have)
		return base_no_memory(error, "what nodes answer", group->options.ranks);
	for (uint32_t rank = 0; rank < group->options.ranks; rank++)
		hearing.have[rank] = !rank || !group_leads_node(group, rank);
	ret = group_round_collect(round, &collection, error);
	free(hearing.have);
	return ret;
}

int group_answer(struct group_round *round, const char *what, const struct base_error *failure,
		 const char *remark, struct base_error *error)
{
	struct group_note note = { 0 };

	group_note_error(&note, failure);
	group_note_text(&note, remark);
	return group_round_post(round, what, &note, error);
}
