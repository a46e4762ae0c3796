/* SPDX-License-Identifier: Apache-2.0 */
/* A generation while it is written, and how it takes its place. */
#include "ckpt/generation.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Names that turn out to be taken, and others who change what is in our place. */
#define MOST_TRIES 16

/* ---- Names ----------------------------------------------------------------------------------- */

uint32_t ckpt_process_number(void)
{
	/* The process in the upper half: a forked child draws a number of its own. */
	static _Atomic uint64_t drawn;
	uint64_t number = atomic_load(&drawn), mine;

	if (number >> 32 == (uint64_t)base_pid())
		return (uint32_t)number;
	mine = (uint64_t)base_pid() << 32 | (uint32_t)base_random();
	return (uint32_t)(atomic_compare_exchange_strong(&drawn, &number, mine) ? mine : number);
}

void ckpt_job_hash(char into[CKPT_JOB_BYTES], const char *token)
{
	uint64_t hash = base_hash_text(token);

	snprintf(into, CKPT_JOB_BYTES, "%08x", (uint32_t)(hash ^ hash >> 32));
}

uint64_t ckpt_name_number(void)
{
	return (uint64_t)ckpt_process_number() << 32 | (uint32_t)base_random();
}

static void make_name(struct ckpt_attempt *attempt, const char *job)
{
	snprintf(attempt->id, sizeof(attempt->id), "%.8s-%.8s-%016llx", job, ring_machine_tag(),
		 (unsigned long long)ckpt_name_number());
	snprintf(attempt->name, sizeof(attempt->name), ".step-%010llu.%s",
		 (unsigned long long)attempt->step, attempt->id);
}

/* ---- Begin ----------------------------------------------------------------------------------- */

/* -EAGAIN: try another name. */
static int make_folder(struct ckpt_attempt *attempt, struct base_error *error)
{
	int ret =
		ring_folder_create_in(&attempt->folder, &attempt->directory, attempt->name, error);

	if (ret == -EEXIST)
		return -EAGAIN;
	if (ret)
		return ret;
	switch (ring_folder_lock(&attempt->folder)) {
	case RING_LOCKED:
		/* Somebody tidying up may have come between, and removed it... */
		if (ring_folder_is_named(&attempt->folder, &attempt->directory, attempt->name))
			return 0;
		break;
	case RING_BUSY: /* ...or is about to */
		break;
	case RING_NO_LOCKS:
		base_log(
			&attempt->log, IOSHAPE_LOG_DEBUG,
			"no locks on directories in %s: what dead jobs leave there is known by age",
			attempt->directory.path);
		return 0;
	}
	ring_folder_close(&attempt->folder);
	return -EAGAIN;
}

int ckpt_attempt_begin(struct ckpt_attempt *attempt, const char *directory, uint64_t step,
		       const char *token, const struct base_log *log, struct base_error *error)
{
	char job[CKPT_JOB_BYTES];
	int ret;

	*attempt = (struct ckpt_attempt)CKPT_NO_ATTEMPT;
	attempt->step = step;
	if (log)
		attempt->log = *log;
	ckpt_job_hash(job, token);
	ret = ring_folder_make(directory, error);
	if (!ret)
		ret = ring_folder_open(&attempt->directory, directory, error);
	if (ret)
		return ret;
	ckpt_tidy(&attempt->directory, job, &attempt->log);
	for (int tries = 0; tries < MOST_TRIES; tries++) {
		make_name(attempt, job);
		ret = make_folder(attempt, error);
		if (ret != -EAGAIN)
			break;
	}
	if (ret == -EAGAIN)
		base_fail(error, ret, "cannot find a free name in %s", directory);
	if (ret)
		ckpt_attempt_abandon(attempt);
	return ret;
}

/* ---- Commit ---------------------------------------------------------------------------------- */

/* What had the place of a generation, and how it is called now. */
struct replaced {
	char name[CKPT_ATTEMPT_NAME_BYTES]; /* "" if there was nothing */
	struct ring_folder folder;          /* where the two could not be swapped: locked */
};

static int write_manifest(struct ckpt_attempt *attempt, const struct zip_manifest *manifest,
			  struct base_error *error)
{
	struct base_buffer text = { 0 };
	int ret = zip_manifest_encode(&text, manifest);

	if (ret == -ENOMEM)
		base_no_memory(error, "a manifest", text.bytes);
	else if (ret)
		base_fail(error, ret,
			  "cannot write the manifest of %s: what its ranks have written %s",
			  attempt->folder.path,
			  ret == IOSHAPE_E_LIMIT ? "is too much for one" : "does not fit together");
	if (!ret)
		ret = ring_folder_put(&attempt->folder, ZIP_MANIFEST_NAME, text.data, text.bytes,
				      error);
	/* Those whom others have written: what does not hold must not replace what does. */
	if (!ret)
		ret = ckpt_check_files(&attempt->folder, manifest,
				       "all nodes must share the directory", error);
	if (!ret)
		ret = ring_folder_sync(&attempt->folder, error);
	base_buffer_free(&text);
	return ret;
}

static bool is_complete(const struct ckpt_attempt *attempt, const char *place)
{
	struct ckpt_generation generation;

	if (ckpt_generation_open(&generation, &attempt->directory, place, attempt->step, NULL))
		return false;
	ckpt_generation_close(&generation);
	return true;
}

/*
 * Filesystems that cannot swap names (NFS): the old one steps aside first. Should we die before the
 * new one has its name, readers and ckpt_tidy() know the old one by the name that it has then. Its
 * lock keeps others from putting it back meanwhile.
 */
static int step_aside(struct ckpt_attempt *attempt, const char *place, struct replaced *old)
{
	int ret;

	ckpt_aside_name(old->name, CKPT_NAME_REPLACED, attempt->step, ckpt_name_number());
	ring_folder_close(&old->folder);
	if (!ring_folder_open_in(&old->folder, &attempt->directory, place, NULL))
		ring_folder_lock(&old->folder);
	ret = ring_folder_rename(&attempt->directory, place, old->name);
	if (ret)
		*old->name = 0;
	return ret;
}

/* -EAGAIN: somebody else changed something at the same time. */
static int try_to_place(struct ckpt_attempt *attempt, const char *place, bool no_replace,
			struct replaced *old)
{
	struct ring_entry entry;
	int ret;

	/* Directories take no name of another that holds something. */
	ret = ring_folder_rename(&attempt->directory, attempt->name, place);
	if (ret != -ENOTEMPTY && ret != -EEXIST)
		return ret;
	if (no_replace && is_complete(attempt, place))
		return -EEXIST;
	/* The second time somebody was there before us: put back what we had moved, or another. */
	if (*old->name && ring_folder_look(&attempt->directory, old->name, &entry, NULL) != -ENOENT)
		return -EBUSY;
	*old->name = 0;
	ret = ring_folder_swap(&attempt->directory, attempt->name, place);
	if (!ret) {
		strcpy(old->name, attempt->name);
		return 0;
	}
	if (ret == -EOPNOTSUPP)
		ret = step_aside(attempt, place, old);
	return !ret || ret == -ENOENT ? -EAGAIN : ret;
}

/* As it was before, as far as that can be done. */
static void take_back(struct ckpt_attempt *attempt, const char *place, bool placed,
		      struct replaced *old)
{
	if (placed && !strcmp(old->name, attempt->name)) {
		ring_folder_swap(&attempt->directory, attempt->name, place);
		return;
	}
	if (placed)
		ring_folder_rename(&attempt->directory, place, attempt->name);
	if (*old->name)
		ring_folder_rename(&attempt->directory, old->name, place);
}

static int put_in_place(struct ckpt_attempt *attempt, const char *place, bool no_replace,
			struct replaced *old, struct base_error *error)
{
	int ret = -EAGAIN;

	for (int tries = 0; ret == -EAGAIN && tries < MOST_TRIES; tries++)
		ret = try_to_place(attempt, place, no_replace, old);
	if (ret) {
		take_back(attempt, place, false, old);
		return base_fail(error, ret, "cannot put %s/%s in place (rename)%s",
				 attempt->directory.path, place,
				 ret == -EEXIST ?
					 " without replacing what is there; choose another "
					 "step" :
				 ret == -ENOENT ? "; somebody removed it while it was written" :
						  "");
	}
	ret = ring_folder_sync(&attempt->directory, error);
	if (ret)
		take_back(attempt, place, true, old);
	return ret;
}

/* Nobody needs it any more: what fails here is left to the next ckpt_tidy(). */
static void remove_replaced(struct ckpt_attempt *attempt, const struct replaced *old)
{
	struct base_error error = { 0 };
	struct ring_folder folder;
	int ret;

	if (!*old->name || ring_folder_open_in(&folder, &attempt->directory, old->name, NULL))
		return;
	ret = ckpt_remove(&folder, &attempt->directory, old->name, &error);
	if (ret == -EBUSY)
		base_log(&attempt->log, IOSHAPE_LOG_INFO,
			 "%s was replaced while somebody reads it; a later save removes it",
			 folder.path);
	else if (ret)
		base_log(&attempt->log, IOSHAPE_LOG_WARNING, "%s", error.text);
	ring_folder_close(&folder);
}

int ckpt_attempt_commit(struct ckpt_attempt *attempt, const struct zip_manifest *manifest,
			bool no_replace, struct base_error *error)
{
	struct replaced old = { .folder = RING_NO_FOLDER };
	char place[CKPT_STEP_NAME_BYTES];
	int ret;

	ckpt_step_name(place, attempt->step);
	ret = write_manifest(attempt, manifest, error);
	if (!ret)
		ret = put_in_place(attempt, place, no_replace, &old, error);
	if (!ret) {
		attempt->committed = true;
		remove_replaced(attempt, &old);
		ckpt_attempt_abandon(attempt);
	}
	ring_folder_close(&old.folder);
	return ret;
}

void ckpt_attempt_abandon(struct ckpt_attempt *attempt)
{
	struct base_error error = { 0 };
	int ret = 0;

	if (attempt->folder.fd >= 0 && !attempt->committed &&
	    ring_folder_is_named(&attempt->folder, &attempt->directory, attempt->name))
		ret = ring_folder_remove(&attempt->folder, &attempt->directory, attempt->name,
					 ZIP_MANIFEST_NAME, NULL, &error);
	/* What is busy goes with the next attempt. */
	if (ret && ret != -EBUSY)
		base_log(&attempt->log, IOSHAPE_LOG_WARNING, "%s", error.text);
	ring_folder_close(&attempt->folder);
	ring_folder_close(&attempt->directory);
}
