/* SPDX-License-Identifier: Apache-2.0 */
/* Saves that do not fit say so before they queue, wait for room, or are skipped. */
#define _GNU_SOURCE
#include "support/full_case.h"

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/stat.h>

static struct ioshape_save *begin(struct ioshape_context *context, const char *path,
				  const struct sample *sample)
{
	struct ioshape_save_options options = options_of(sample);
	struct ioshape_save *save = NULL;

	if (ioshape_save_tensors_async(context, path, sample->tensors, sample->count, &options,
				       &save))
		fprintf(stderr, "%s\n", ioshape_context_message(context));
	return save;
}

static unsigned times_heard(const char *words)
{
	unsigned times = 0;

	pthread_mutex_lock(&heard.lock);
	for (const char *at = heard.lines; (at = strstr(at, words)); at++)
		times++;
	pthread_mutex_unlock(&heard.lock);
	return times;
}

/* It waits for room, and has told so. */
static bool is_waiting(struct ioshape_save *save)
{
	enum ioshape_phase phase = IOSHAPE_PHASE_DONE;

	for (int tries = 0; tries < 500; tries++) {
		ioshape_save_progress(save, &phase, NULL, NULL);
		if (phase == IOSHAPE_PHASE_WAIT && has_heard("waits for room"))
			return true;
		usleep(10000);
	}
	return false;
}

static void *make_room_soon(void *unused)
{
	usleep(300000);
	make_room();
	return unused;
}

/* ---- fail ------------------------------------------------------------------------------------ */

static bool says_it_all(const char *message)
{
	REQUIRE_SAID(strstr(message, file), message);
	REQUIRE_SAID(strstr(message, "it needs 4"), message);
	REQUIRE_SAID(strstr(message, "are free on its filesystem ("), message);
	REQUIRE_SAID(strstr(message, "save elsewhere"), message);
	REQUIRE_SAID(strstr(message, "No space left"), message);
	return true;
}

static bool fails_before_it_queues(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL, 0);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_writer_options writer_options = IOSHAPE_WRITER_OPTIONS_INIT;
	struct ioshape_file_options file_options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_slot *slot = NULL;
	struct ioshape_writer *writer;
	struct ioshape_file *raw;
	struct ioshape_save *save;

	/* Somebody has the only slot: who would queue would wait for ever. */
	REQUIRE_SAID(!ioshape_slot_acquire(context, NULL, &slot), ioshape_context_message(context));
	REQUIRE_THAT(save_to(context, file, &new_sample, &report) == -ENOSPC);
	if (!says_it_all(ioshape_context_message(context)))
		return false;
	REQUIRE_THAT(strstr(ioshape_context_message(context), "full=wait or full=skip"));
	REQUIRE_THAT(report.position == 0 && !report.skipped && *report.filesystem);
	save = begin(context, file, &new_sample);
	REQUIRE_SAID(ioshape_save_wait(save, 10000) == -ENOSPC, ioshape_save_message(save));
	if (!says_it_all(ioshape_save_message(save)))
		return false;
	ioshape_save_free(save);
	writer_options.expected_bytes = file_options.expected_bytes = LARGE_BYTES;
	REQUIRE_THAT(ioshape_writer_open(context, file, &writer_options, &writer) == -ENOSPC);
	REQUIRE_THAT(ioshape_file_open(context, file, &file_options, &raw) == -ENOSPC);
	REQUIRE_THAT(says_it_all(ioshape_context_message(context)));
	ioshape_slot_release(slot);
	ioshape_context_free(context);
	return holds(&old_sample);
}

/* What fits is saved; what is small is not even looked at. */
static bool what_fits_is_saved(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL, 0);
	struct sample small, fitting;
	int ret;

	sample_make(&small, 3, 1000);
	sample_make(&fitting, 3, LEFT_BYTES / 2);
	ret = save_to(context, file, &small, NULL);
	REQUIRE_SAID(!ret, ioshape_context_message(context));
	ret = save_to(context, file, &fitting, NULL);
	REQUIRE_SAID(!ret, ioshape_context_message(context));
	REQUIRE_THAT(holds(&fitting));
	sample_free(&small);
	sample_free(&fitting);
	ioshape_context_free(context);
	return true;
}

/* ---- skip ------------------------------------------------------------------------------------ */

static bool is_skipped(int ret, const struct ioshape_report *report, const char *message)
{
	REQUIRE_SAID(ret == IOSHAPE_E_SKIPPED, message);
	REQUIRE_THAT(report->skipped == 1 && report->fallbacks >= 1);
	REQUIRE_SAID(strstr(report->fallback_text, "it needs 4"), report->fallback_text);
	REQUIRE_SAID(!strstr(report->fallback_text, "; "), report->fallback_text);
	REQUIRE_THAT(!report->file_bytes && *report->filesystem);
	REQUIRE_SAID(has_heard("skipped (full=skip)"), heard.lines);
	return strstr(message, "skipped") && says_it_all(message);
}

static bool skips(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_SKIP, 0);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_file_options file_options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *raw;
	struct ioshape_save *save;
	int ret;

	ret = save_to(context, file, &new_sample, &report);
	if (!is_skipped(ret, &report, ioshape_context_message(context)))
		return false;
	*heard.lines = 0;
	save = begin(context, file, &new_sample);
	ret = ioshape_save_wait(save, -1);
	ioshape_save_report(save, &report);
	if (!is_skipped(ret, &report, ioshape_save_message(save)))
		return false;
	ioshape_save_free(save);
	file_options.expected_bytes = LARGE_BYTES;
	ret = ioshape_file_open(context, file, &file_options, &raw);
	REQUIRE_THAT(ret == IOSHAPE_E_SKIPPED && !raw);
	/* Not announced: it is found out in the middle. */
	REQUIRE_THAT(!ioshape_file_open(context, file, NULL, &raw));
	for (ret = 0; !ret;)
		ret = ioshape_file_write(raw, new_sample.expected[4], 1 << 20);
	REQUIRE_SAID(ret == IOSHAPE_E_SKIPPED, ioshape_file_message(raw));
	ioshape_file_free(raw);
	REQUIRE_THAT(holds(&old_sample));
	make_room();
	REQUIRE_THAT(!save_to(context, file, &new_sample, &report) && !report.skipped);
	ioshape_context_free(context);
	return holds(&new_sample);
}

/* A device that is full is not skipped: what it got is gone. */
static bool a_device_is_not_skipped(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_SKIP, 0);

	REQUIRE_THAT(save_to(context, "/dev/full", &new_sample, NULL) == -ENOSPC);
	ioshape_context_free(context);
	context = open_context(IOSHAPE_FULL_WAIT, 60000);
	REQUIRE_THAT(save_to(context, "/dev/full", &new_sample, NULL) == -ENOSPC);
	ioshape_context_free(context);
	return true;
}

/* ---- wait ------------------------------------------------------------------------------------ */

static bool waits(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 60000);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_file_options file_options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *raw;
	pthread_t thread;

	pthread_create(&thread, NULL, make_room_soon, NULL);
	REQUIRE_SAID(!save_to(context, file, &new_sample, &report),
		     ioshape_context_message(context));
	pthread_join(thread, NULL);
	REQUIRE_THAT(report.total_s >= 0.25 && report.slot_s < 0.2);
	REQUIRE_SAID(strstr(report.fallback_text, "waited 0."), report.fallback_text);
	REQUIRE_SAID(has_heard("waits for room, at most 60.0 s"), heard.lines);
	REQUIRE_SAID(has_heard("goes on after waiting 0."), heard.lines);
	REQUIRE_SAID(times_heard("waits for room") == 1, heard.lines);
	REQUIRE_THAT(holds(&new_sample));
	fill_up(LEFT_BYTES);
	pthread_create(&thread, NULL, make_room_soon, NULL);
	file_options.expected_bytes = LARGE_BYTES;
	REQUIRE_THAT(!ioshape_file_open(context, file, &file_options, &raw));
	pthread_join(thread, NULL);
	ioshape_file_free(raw);
	ioshape_context_free(context);
	return true;
}

static bool waits_so_long(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 300);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	uint64_t begin_ns = base_now_ns();

	REQUIRE_THAT(save_to(context, file, &new_sample, &report) == -ENOSPC);
	REQUIRE_THAT(base_seconds(base_now_ns() - begin_ns) >= 0.3);
	REQUIRE_THAT(report.total_s < 5);
	REQUIRE_SAID(strstr(ioshape_context_message(context), "after waiting 0.3 s"),
		     ioshape_context_message(context));
	REQUIRE_THAT(says_it_all(ioshape_context_message(context)));
	ioshape_context_free(context);
	return holds(&old_sample);
}

static int stop_after_a_while(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)done, (void)total;
	return phase == IOSHAPE_PHASE_WAIT && ++*(unsigned *)user > 3;
}

static bool waiting_is_ended(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 60000);
	struct ioshape_save_options options = options_of(&new_sample);
	struct ioshape_save *save = begin(context, file, &new_sample);
	unsigned calls = 0;

	REQUIRE_THAT(is_waiting(save));
	ioshape_save_cancel(save);
	REQUIRE_THAT(ioshape_save_wait(save, 5000) == -ECANCELED);
	ioshape_save_free(save);
	options.progress = stop_after_a_while;
	options.progress_user = &calls;
	REQUIRE_THAT(ioshape_save_tensors(context, file, new_sample.tensors, new_sample.count,
					  &options) == -ECANCELED);
	REQUIRE_THAT(strstr(ioshape_context_message(context), "waited for room"));
	/* And by freeing everything. */
	save = begin(context, file, &new_sample);
	REQUIRE_THAT(is_waiting(save));
	ioshape_context_free(context);
	ioshape_save_free(save);
	return holds(&old_sample);
}

static bool who_waits_is_in_nobodys_way(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 60000);
	struct ioshape_save *save = begin(context, file, &new_sample), *next;
	struct sample small;

	sample_make(&small, 6, 1000);
	REQUIRE_THAT(is_waiting(save));
	/* What is small has its room, and comes after it. */
	next = begin(context, file, &small);
	REQUIRE_SAID(!save_to(context, elsewhere, &new_sample, NULL),
		     ioshape_context_message(context));
	REQUIRE_THAT(ioshape_save_wait(next, 100) == -ETIMEDOUT && !ioshape_save_poll(save));
	unlink(elsewhere);
	make_room();
	REQUIRE_SAID(!ioshape_save_wait(save, 10000), ioshape_save_message(save));
	REQUIRE_SAID(!ioshape_save_wait(next, 10000), ioshape_save_message(next));
	REQUIRE_THAT(holds(&small));
	ioshape_save_free(save);
	ioshape_save_free(next);
	sample_free(&small);
	ioshape_context_free(context);
	return true;
}

/* There is room for one at a time, and the last one is what stays. */
static bool order_is_kept(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 60000);
	struct ioshape_save *first = begin(context, file, &new_sample), *second;
	struct sample last;
	struct stat status;

	sample_make(&last, 4, LARGE_BYTES);
	REQUIRE_THAT(is_waiting(first));
	/* It looks less and less often: the second one is the first to see that there is room. */
	usleep(750000);
	unlink(file);
	REQUIRE_THAT(!stat(filler, &status) && !truncate(filler, status.st_size - LARGE_BYTES / 2));
	second = begin(context, file, &last);
	REQUIRE_SAID(!ioshape_save_wait(first, 10000), ioshape_save_message(first));
	REQUIRE_THAT(ioshape_save_wait(second, 100) == -ETIMEDOUT && holds(&new_sample));
	/* The first file is in its way, and will be until there is room. */
	make_room();
	REQUIRE_SAID(!ioshape_save_wait(second, 10000), ioshape_save_message(second));
	REQUIRE_THAT(holds(&last));
	ioshape_save_free(first);
	ioshape_save_free(second);
	sample_free(&last);
	ioshape_context_free(context);
	return true;
}

/* ---- What killed writers left is room -------------------------------------------------------- */

static int die_at(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user, (void)done, (void)total;
	if (phase == IOSHAPE_PHASE_WRITE)
		raise(SIGKILL);
	return 0;
}

static int save_and_die(void *unused)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL, 0);
	struct ioshape_save_options options = options_of(&new_sample);

	(void)unused;
	options.progress = die_at;
	ioshape_save_tensors(context, file, new_sample.tensors, new_sample.count, &options);
	return 0;
}

static bool the_dead_make_room(void)
{
	struct ioshape_context *context;

	make_room();
	scratch_in_child(save_and_die, NULL);
	REQUIRE_THAT(scratch_temporaries(where) == 1);
	fill_up(LEFT_BYTES);
	context = open_context(IOSHAPE_FULL_FAIL, 0);
	REQUIRE_SAID(!save_to(context, file, &new_sample, NULL), ioshape_context_message(context));
	ioshape_context_free(context);
	return holds(&new_sample);
}

/* ---- Found out late: the filesystem reserves nothing, and another writer takes the room -------
 */

struct filling {
	atomic_uint times;
	uint64_t from_bytes;
};

static int fill_it(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct filling *filling = user;

	(void)total;
	if (phase == IOSHAPE_PHASE_WRITE && done > filling->from_bytes &&
	    atomic_load(&filling->times)) {
		atomic_fetch_sub(&filling->times, 1);
		fill_up(0);
	}
	return 0;
}

static bool found_out_late(void)
{
	static const enum ioshape_full rules[] = { IOSHAPE_FULL_FAIL, IOSHAPE_FULL_SKIP,
						   IOSHAPE_FULL_WAIT };
	static const int codes[] = { -ENOSPC, IOSHAPE_E_SKIPPED, 0 };

	for (size_t i = 0; i < ARRAY_LENGTH(rules); i++) {
		struct ioshape_context *context = open_context(rules[i], 60000);
		struct ioshape_save_options options = options_of(&new_sample);
		struct ioshape_report report = IOSHAPE_REPORT_INIT;
		struct ioshape_save *save = NULL;
		struct filling filling = { 1, 0 };
		pthread_t thread;
		int ret;

		make_room();
		REQUIRE_THAT(!save_to(context, file, &old_sample, NULL));
		options.progress = fill_it;
		options.progress_user = &filling;
		ret = ioshape_save_tensors_async(context, file, new_sample.tensors,
						 new_sample.count, &options, &save);
		REQUIRE_THAT(!ret && save);
		if (codes[i] == 0) {
			REQUIRE_SAID(is_waiting(save), heard.lines);
			/* The room that its first try had is given back. */
			REQUIRE_THAT(!scratch_temporaries(where));
			pthread_create(&thread, NULL, make_room_soon, NULL);
			pthread_join(thread, NULL);
		}
		ret = ioshape_save_wait(save, 20000);
		ioshape_save_report(save, &report);
		REQUIRE_SAID(!atomic_load(&filling.times), "it was not filled");
		REQUIRE_SAID(ret == codes[i], ioshape_save_message(save));
		REQUIRE_THAT(report.skipped == (ret == IOSHAPE_E_SKIPPED));
		REQUIRE_SAID(ret || strstr(report.fallback_text, "waited "), report.fallback_text);
		ioshape_save_free(save);
		ioshape_context_free(context);
		if (!holds(ret ? &old_sample : &new_sample))
			return false;
	}
	return true;
}

/* A save stands still when it has written something. */
struct gate {
	sem_t reached, opened;
	atomic_bool passed;
};

static void gate_init(struct gate *gate)
{
	sem_init(&gate->reached, 0, 0);
	sem_init(&gate->opened, 0, 0);
	atomic_store(&gate->passed, false);
}

static int stand_still(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct gate *gate = user;

	(void)total;
	if (phase != IOSHAPE_PHASE_WRITE || !done || atomic_exchange(&gate->passed, true))
		return 0;
	sem_post(&gate->reached);
	sem_wait(&gate->opened);
	return 0;
}

/* More than one piece of staging memory, the first of which had been written. */
static bool all_that_is_staged_is_written_again(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 60000);
	struct filling filling = { 1, 18u << 20 };
	struct ioshape_save_options options;
	struct ioshape_save *save = NULL;
	struct sample large;

	make_room();
	sample_make(&large, 5, 20u << 20);
	options = options_of(&large);
	options.progress = fill_it;
	options.progress_user = &filling;
	ioshape_save_tensors_async(context, file, large.tensors, large.count, &options, &save);
	REQUIRE_SAID(save && is_waiting(save), heard.lines);
	make_room();
	REQUIRE_SAID(!ioshape_save_wait(save, 20000), ioshape_save_message(save));
	REQUIRE_THAT(!atomic_load(&filling.times) && holds(&large));
	ioshape_save_free(save);
	sample_free(&large);
	ioshape_context_free(context);
	return true;
}

/* The later one is complete, holds the room, and would wait for the earlier one to end. */
static bool a_later_save_has_the_room(void)
{
	struct ioshape_context *context = open_with_slots(IOSHAPE_FULL_WAIT, 60000, 2);
	struct ioshape_save_options options;
	struct ioshape_save *first = NULL, *second;
	enum ioshape_phase phase = IOSHAPE_PHASE_STAGE;
	struct sample large;
	struct gate gate;

	make_room();
	sample_make(&large, 5, 3 * LARGE_BYTES);
	gate_init(&gate);
	options = options_of(&large);
	options.progress = stand_still;
	options.progress_user = &gate;
	ioshape_save_tensors_async(context, file, large.tensors, large.count, &options, &first);
	REQUIRE_THAT(first);
	sem_wait(&gate.reached);
	second = begin(context, file, &new_sample);
	for (int tries = 0; tries < 500 && phase < IOSHAPE_PHASE_SYNC; tries++) {
		usleep(10000);
		ioshape_save_progress(second, &phase, NULL, NULL);
	}
	REQUIRE_THAT(phase >= IOSHAPE_PHASE_SYNC);
	fill_up(0);
	sem_post(&gate.opened);
	REQUIRE_THAT(ioshape_save_wait(first, 20000) == -ENOSPC);
	REQUIRE_SAID(strstr(ioshape_save_message(first), "a later save to it has taken the room"),
		     ioshape_save_message(first));
	REQUIRE_SAID(!ioshape_save_wait(second, 20000), ioshape_save_message(second));
	ioshape_save_free(first);
	ioshape_save_free(second);
	sample_free(&large);
	ioshape_context_free(context);
	return holds(&new_sample);
}

/* Bytes that a caller brings once cannot be written again. */
static int fetch_zeros(void *user, uint64_t offset, void *into, size_t bytes)
{
	(void)user, (void)offset;
	memset(into, 0, bytes);
	return 0;
}

static bool what_cannot_be_repeated_fails(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_WAIT, 60000);
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	const struct ioshape_record record = { .name = "data.pkl",
					       .bytes = LARGE_BYTES,
					       .fetch = fetch_zeros };
	struct filling filling = { 1, 0 };
	int ret;

	make_room();
	options.progress = fill_it;
	options.progress_user = &filling;
	ret = ioshape_save_records(context, file, &record, 1, &options);
	REQUIRE_THAT(ret == -ENOSPC);
	REQUIRE_SAID(strstr(ioshape_context_message(context), "not tried again"),
		     ioshape_context_message(context));
	ioshape_context_free(context);
	return !scratch_temporaries(where);
}

/* ---- Inodes: statfs() shows room, and nothing can be created ----------------------------------
 */

static bool no_inodes(void)
{
	struct ioshape_context *context = open_context(IOSHAPE_FULL_FAIL, 0);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	char path[PATH_MAX + 16];
	pthread_t thread;
	int ret;

	make_room();
	write_zeros(filler, 1);
	for (unsigned i = 0; i < 100; i++) {
		snprintf(path, sizeof(path), "%s/small%u", where, i);
		if (!write_zeros(path, 1))
			break;
	}
	ret = save_to(context, file, &new_sample, NULL);
	REQUIRE_THAT(ret == -ENOSPC);
	REQUIRE_SAID(strstr(ioshape_context_message(context), "its inodes are used up"),
		     ioshape_context_message(context));
	ioshape_context_free(context);
	context = open_context(IOSHAPE_FULL_WAIT, 400);
	REQUIRE_THAT(save_to(context, file, &new_sample, NULL) == -ENOSPC);
	ioshape_context_free(context);
	context = open_context(IOSHAPE_FULL_WAIT, 60000);
	pthread_create(&thread, NULL, make_room_soon, NULL);
	ret = save_to(context, file, &new_sample, &report);
	pthread_join(thread, NULL);
	REQUIRE_SAID(!ret, ioshape_context_message(context));
	/* Tried more than once. */
	REQUIRE_SAID(times_heard("waits for room") == 1, heard.lines);
	REQUIRE_SAID(times_heard("was written after waiting") == 1, heard.lines);
	ioshape_context_free(context);
	return holds(&new_sample);
}

/* ---- All of them ----------------------------------------------------------------------------- */

static const struct full_test tests[] = {
	{ "what does not fit fails before it queues", fails_before_it_queues, 3 },
	{ "what fits is saved", what_fits_is_saved, 3 },
	{ "what does not fit is skipped", skips, 3 },
	{ "a device is not skipped", a_device_is_not_skipped, 1 },
	{ "a save waits for room", waits, 1 },
	{ "it waits so long", waits_so_long, 1 },
	{ "waiting is ended", waiting_is_ended, 1 },
	{ "who waits is in nobody's way", who_waits_is_in_nobodys_way, 1 },
	{ "saves to one file keep their order", order_is_kept, 1 },
	{ "what the dead left is room", the_dead_make_room, 3 },
	{ "found out in the middle", found_out_late, 4 },
	{ "all that is staged is written again", all_that_is_staged_is_written_again, 4 },
	{ "a later save has the room", a_later_save_has_the_room, 4 },
	{ "what cannot be repeated fails", what_cannot_be_repeated_fails, 4 },
	{ "no inodes", no_inodes, 8 },
};

int main(void)
{
	return run_tests(tests, ARRAY_LENGTH(tests));
}
