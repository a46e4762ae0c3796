/* SPDX-License-Identifier: Apache-2.0 */
/* Saves a file over NFS, and checks it on the server and on its clients. */
#ifndef TESTS_SUPPORT_NFS_CASE_H
#define TESTS_SUPPORT_NFS_CASE_H

#include "support/nfs_server.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/tap.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define FILE_HERE NFS_CLIENT_FOLDER "/model.pt"
#define FILE_THERE NFS_SERVER_FOLDER "/model.pt"

static struct sample old_sample, new_sample;

static inline int save_with(struct ioshape_context *context, const struct sample *sample,
			    struct ioshape_save_options *options)
{
	options->metadata = &sample->metadata;
	return ioshape_save_tensors(context, FILE_HERE, sample->tensors, sample->count, options,
				    NULL);
}

/*
 * Saves with a context of its own, as another process would. Returns 0, or a code and sets the
 * complaint.
 */
static inline int save(enum ioshape_engine engine, const struct sample *sample, bool no_replace,
		       struct ioshape_report *report)
{
	struct ioshape_context *context = sample_context(engine, IOSHAPE_DIRECT_PREFER);
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	int ret;

	options.replace = no_replace ? IOSHAPE_OFF : IOSHAPE_ON;
	options.report = report;
	ret = save_with(context, sample, &options);
	if (ret)
		complain("%s", ioshape_last_error()->sentence);
	ioshape_context_free(context);
	return ret;
}

static inline int check(const char *path, const struct sample *sample, char *why, size_t why_bytes)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	int ret = sample_check(context, path, sample, why, why_bytes);

	ioshape_context_free(context);
	return ret;
}

/*
 * Returns whether the server and the client have the sample. A durable save must be on the server.
 */
static inline bool holds(const struct sample *sample)
{
	char why[512];

	if (check(FILE_THERE, sample, why, sizeof(why)))
		return complain("the server does not have it: %s", why);
	scratch_evict(FILE_HERE);
	if (check(FILE_HERE, sample, why, sizeof(why)))
		return complain("the client does not see it: %s", why);
	return true;
}

/*
 * Waits until the client has removed its ".nfs" names. It gives them to files that are replaced
 * while they are open, and removes them later.
 */
static inline bool hidden_names_go(const char *folder)
{
	for (unsigned tries = 0; tries < 300; tries++) {
		DIR *listing = opendir(folder);
		struct dirent *entry = NULL;

		while (listing && (entry = readdir(listing)) &&
		       strncmp(entry->d_name, ".nfs", 4) != 0)
			;
		if (listing)
			closedir(listing);
		if (!entry)
			return true;
		usleep(10000);
	}
	return complain("%s still has a name of the client's in it", folder);
}

static inline bool nothing_is_left_behind(void)
{
	if (scratch_temporaries(NFS_SERVER_FOLDER))
		return complain("a temporary file was left behind");
	return true;
}

#endif
