/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes make elements together. All of them go through the same list, block by block: for each
 * element that is made, those that it is the sum of. Whoever holds one of these sends it, on a
 * thread of its own, and the target adds them up. The first transfer of the list that has not
 * happened is always the next one for both its sides, so nobody waits for ever. So also a side that
 * has failed goes through all of it: only when bytes do not travel any more it ends.
 */
#define _GNU_SOURCE
#include "group/parity/parity.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES (4 * MIB)
/* Behind each block its checksum. */
#define MESSAGE_BYTES (BLOCK_BYTES + 4)

/* What this node has to do with: of another set it needs nothing, and sends it nothing. */
struct work {
	struct group_making making;
	struct group_set set;
	uint64_t segment_bytes;
	uint32_t first, count; /* elements that are made */
	uint64_t blocks;       /* of each */
};

struct exchanging {
	struct group_exchange *exchange;
	struct ioshape_context *context;
	struct work *works;
	uint32_t count;
	uint32_t turns;
	uint64_t most_steps;       /* blocks of all elements of the largest */
	uint32_t own;              /* node of today */
	struct base_error sending; /* what the thread failed with */
};

static uint32_t rank_of(const struct exchanging *exchanging, uint32_t node)
{
	return exchanging->exchange->round->group->leaders[node];
}

static uint32_t tag_of(const struct exchanging *exchanging)
{
	const struct group_round *round = exchanging->exchange->round;

	return (uint32_t)((round->group->id % 16384 + round->number) % 16384);
}

static uint64_t steps_of(const struct work *work)
{
	return work->count * work->blocks;
}

/* ---- The list -------------------------------------------------------------------------------- */

static bool concerns(const struct exchanging *exchanging, const struct work *work)
{
	bool concerned = work->making.target == exchanging->own;

	for (uint32_t i = 0; i < work->set.count; i++)
		concerned |= exchanging->exchange->holders[work->set.nodes[i]] == exchanging->own;
	return concerned;
}

static struct work work_for(const struct group_exchange *exchange,
			    const struct group_making *making)
{
	struct work work = {
		.making = *making,
		.set = group_set_of(&exchange->record->sets, making->node),
	};

	work.segment_bytes = group_segment_bytes(exchange->manifest, exchange->record, &work.set);
	work.first = exchange->fresh ? group_segments_of(&work.set) : 0;
	work.count = group_segments_of(&work.set) + work.set.parity - work.first;
	work.blocks = (work.segment_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
	return work;
}

static int list_works(struct exchanging *exchanging, struct base_error *error)
{
	const struct group_exchange *exchange = exchanging->exchange;

	exchanging->works = calloc(MAX(exchange->count, 1), sizeof(*exchanging->works));
	if (!exchanging->works)
		return base_no_memory(error, "what nodes send each other",
				      exchange->count * sizeof(*exchanging->works));
	for (uint32_t i = 0; i < exchange->count; i++) {
		const struct work work = work_for(exchange, &exchange->makings[i]);

		if (!concerns(exchanging, &work))
			continue;
		exchanging->works[exchanging->count++] = work;
		exchanging->turns = MAX(exchanging->turns, work.making.turn + 1);
		exchanging->most_steps = MAX(exchanging->most_steps, steps_of(&work));
	}
	return 0;
}

/* One block of one element. */
struct step {
	uint32_t element;
	uint64_t offset;
	size_t bytes;
};

static struct step step_at(const struct work *work, uint64_t number)
{
	struct step step = {
		.element = work->first + (uint32_t)(number / work->blocks),
		.offset = number % work->blocks * BLOCK_BYTES,
	};

	step.bytes = MIN(BLOCK_BYTES, work->segment_bytes - step.offset);
	return step;
}

static int find_sources(const struct exchanging *exchanging, const struct work *work,
			uint32_t element, struct group_source sources[BASE_MOST_DATA],
			uint32_t *count, struct base_error *error)
{
	const struct group_exchange *exchange = exchanging->exchange;

	if (!group_find_sources(&work->set, exchange->holders, exchange->parities, element,
				exchange->fresh, sources, count))
		return 0;
	return base_refuse(error, -ENODATA,
			   "too many nodes are lost to restore what node %u had of generation %llu",
			   work->making.node, (unsigned long long)exchange->manifest->step);
}

/* ---- Sending --------------------------------------------------------------------------------- */

/* What cannot be read goes with a checksum that says so. */
static int send_block(struct exchanging *exchanging, struct group_held *held,
		      const struct work *work, const struct group_source *source,
		      const struct step *step, uint8_t *message, struct base_error *error)
{
	struct group_exchange *exchange = exchanging->exchange;
	const struct ioshape_group_options *options = &exchange->round->group->options;
	const uint32_t to = rank_of(exchanging, work->making.target);
	uint32_t crc;
	int sent, ret = group_held_get(held, source->node, source->element, step->offset, message,
				       step->bytes, error);

	crc = base_crc32(0, message, step->bytes);
	base_put_le(message + step->bytes, ret ? ~crc : crc, 4);
	sent = options->comm->send(options->comm->user, to, tag_of(exchanging), message,
				   step->bytes + 4, options->deadline_ms);
	if (!sent)
		return ret;
	atomic_store(&exchange->broken, true);
	return base_fail(error, sent, "cannot send what protects a generation to rank %u", to);
}

static int send_step(struct exchanging *exchanging, struct group_held *held,
		     const struct work *work, uint64_t number, uint8_t *message,
		     struct base_error *error)
{
	const uint32_t *holders = exchanging->exchange->holders;
	const struct step step = step_at(work, number);
	struct group_source sources[BASE_MOST_DATA];
	uint32_t count;
	int ret = find_sources(exchanging, work, step.element, sources, &count, error);

	for (uint32_t i = 0; i < count && !atomic_load(&exchanging->exchange->broken); i++) {
		if (holders[sources[i].node] == exchanging->own &&
		    work->making.target != exchanging->own &&
		    send_block(exchanging, held, work, &sources[i], &step, message, error))
			ret = error->code;
	}
	return ret;
}

/* What fails first is told. */
static void send_all(struct exchanging *exchanging, uint8_t *message, struct base_error *error)
{
	struct group_held held = { .exchange = exchanging->exchange };

	for (uint32_t turn = 0; turn < exchanging->turns; turn++) {
		for (uint64_t number = 0; number < exchanging->most_steps; number++) {
			for (uint32_t i = 0; i < exchanging->count; i++) {
				const struct work *work = &exchanging->works[i];
				struct base_error failure = { 0 };

				if (atomic_load(&exchanging->exchange->broken))
					goto out;
				if (work->making.turn == turn && number < steps_of(work) &&
				    send_step(exchanging, &held, work, number, message, &failure))
					base_pass_on(error, &failure);
			}
		}
	}
out:
	group_held_close(&held);
}

static void *run_sending(void *user)
{
	struct exchanging *exchanging = user;
	struct base_error error = { 0 };
	uint8_t *message = calloc(1, MESSAGE_BYTES); /* also what cannot be read is sent */

	if (message) {
		send_all(exchanging, message, &error);
	} else {
		atomic_store(&exchanging->exchange->broken, true);
		base_no_memory(&error, "bytes on their way", MESSAGE_BYTES);
	}
	free(message);
	exchanging->sending = error;
	return NULL;
}

/* ---- Adding up ------------------------------------------------------------------------------- */

/* What one target gets, one block after the other. */
struct summing {
	struct exchanging *exchanging;
	const struct work *work;
	struct group_held held;
	uint64_t next;    /* step */
	uint8_t *message; /* one that comes */
	uint8_t *sum;
	size_t at, bytes; /* of the sum: what has been taken, and what there is */
};

static int receive(struct summing *summing, uint32_t from, size_t bytes, struct base_error *error)
{
	const struct exchanging *exchanging = summing->exchanging;
	const struct ioshape_group_options *options = &exchanging->exchange->round->group->options;
	const int ret = options->comm->receive(options->comm->user, from, tag_of(exchanging),
					       summing->message, bytes + 4, options->deadline_ms);

	if (ret) {
		atomic_store(&exchanging->exchange->broken, true);
		return base_fail(error, ret,
				 "cannot receive what protects a generation from rank %u", from);
	}
	if (base_crc32(0, summing->message, bytes) == base_get_le(summing->message + bytes, 4))
		return 0;
	return base_refuse(error, -EIO,
			   "rank %u cannot read its files, or they were damaged on their way",
			   from);
}

static int add_source(struct summing *summing, const struct group_source *source,
		      const struct step *step, struct base_error *error)
{
	const struct exchanging *exchanging = summing->exchanging;
	const uint32_t holder = exchanging->exchange->holders[source->node];
	int ret;

	if (holder == exchanging->own)
		ret = group_held_get(&summing->held, source->node, source->element, step->offset,
				     summing->message, step->bytes, error);
	else
		ret = receive(summing, rank_of(exchanging, holder), step->bytes, error);
	if (!ret)
		base_erasure_add(summing->sum, summing->message, step->bytes, source->coefficient);
	return ret;
}

static bool is_broken(const struct summing *summing)
{
	return atomic_load(&summing->exchanging->exchange->broken);
}

/* All that is sent for it is received, whatever becomes of it. */
static int next_block(struct summing *summing, struct base_error *error)
{
	const struct step step = step_at(summing->work, summing->next++);
	struct group_source sources[BASE_MOST_DATA];
	uint32_t count;
	int ret = find_sources(summing->exchanging, summing->work, step.element, sources, &count,
			       error);

	memset(summing->sum, 0, step.bytes);
	for (uint32_t i = 0; i < count && !is_broken(summing); i++) {
		struct base_error failure = { 0 };

		if (add_source(summing, &sources[i], &step, &failure))
			ret = base_pass_on(error, &failure);
	}
	if (!ret && is_broken(summing))
		ret = base_refuse(error, -ECANCELED, "the exchange was given up");
	summing->at = 0;
	summing->bytes = ret ? 0 : step.bytes;
	group_round_beat(summing->exchanging->exchange->round);
	return ret;
}

/* After a failure: the others send it all the same. */
static void skip_rest(struct summing *summing)
{
	while (summing->next < steps_of(summing->work) && !is_broken(summing))
		next_block(summing, NULL);
}

/* The next bytes that follow; without a file they are passed over. */
static int put_next(struct summing *summing, struct ring_writer *file, uint64_t bytes,
		    struct base_error *error)
{
	int ret = 0;

	while (!ret && bytes) {
		size_t piece;

		if (summing->at == summing->bytes)
			ret = next_block(summing, error);
		piece = MIN(summing->bytes - summing->at, bytes);
		if (!ret && file)
			ret = ring_writer_put(file, summing->sum + summing->at, piece, NULL, error);
		summing->at += piece;
		bytes -= piece;
	}
	return ret;
}

/* ---- Files ----------------------------------------------------------------------------------- */

struct target_file {
	struct summing *summing;
	const struct zip_manifest_file *restored; /* NULL: it is that of the parities */
	const struct base_buffer *record;
	uint64_t bytes; /* of parities */
	const char *path;
};

static int put_file(void *user, struct ring_writer *writer, struct base_error *error)
{
	const struct target_file *file = user;
	int ret = 0;

	if (file->restored)
		ret = put_next(file->summing, writer, file->restored->bytes, error);
	else
		ret = ring_writer_put(writer, file->record->data, file->record->bytes, NULL, error);
	if (!ret && !file->restored)
		ret = put_next(file->summing, writer, file->bytes, error);
	if (!ret)
		ret = ring_writer_finish(writer, error);
	if (ret || !file->restored || ring_writer_crc32(writer) == file->restored->crc32)
		return ret;
	return base_refuse(error, IOSHAPE_E_DAMAGED,
			   "\"%s\" was restored from other nodes, and its checksum is another: one "
			   "of their copies is damaged",
			   file->path);
}

static void free_file(void *user, struct ring_writer *writer)
{
	(void)user;
	ring_writer_free(writer);
}

static int write_file(struct target_file *target, const char *name, uint64_t bytes,
		      struct base_error *error)
{
	const struct exchanging *exchanging = target->summing->exchanging;
	const pthread_t self = pthread_self();
	const struct save_watch watch = { .blocked = &self };
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct save_file file = {
		.context = exchanging->context,
		.options = { .expected_bytes = bytes, .exact = true, .want_crc32 = true },
		/* Nodes wait for each other's blocks: none of them may wait for its turn. */
		.without_slot = true,
		.put = put_file,
		.free = free_file,
		.user = target,
	};
	char *path;
	int ret;

	if (asprintf(&path, "%s/%s", exchanging->exchange->folder, name) < 0)
		return base_no_memory(error, "a path", strlen(name));
	target->path = file.path = file.absolute = path;
	ret = save_write_file(&file, &watch, NULL, &report, error);
	free(path);
	return ret;
}

/* Those of the manifest, in their order, and what is left of the last segment. */
static int write_restored(struct summing *summing, struct base_error *error)
{
	const struct group_exchange *exchange = summing->exchanging->exchange;
	const struct work *work = summing->work;
	uint64_t left = work->segment_bytes * group_segments_of(&work->set);
	int ret = 0;

	for (uint32_t i = 0; !ret && i < exchange->manifest->file_count; i++) {
		struct target_file target = {
			.summing = summing,
			.restored = &exchange->manifest->files[i],
		};

		if (exchange->record->node_of_file[i] != work->making.node)
			continue;
		left -= target.restored->bytes;
		ret = write_file(&target, target.restored->name, target.restored->bytes, error);
	}
	return ret ? ret : put_next(summing, NULL, left, error);
}

static int write_parities(struct summing *summing, struct base_error *error)
{
	const struct work *work = summing->work;
	struct group_record record = *summing->exchanging->exchange->record;
	struct base_buffer text = { 0 };
	struct target_file target = {
		.summing = summing,
		.record = &text,
		.bytes = work->segment_bytes * work->set.parity,
	};
	char name[GROUP_PARITY_NAME_BYTES];
	int ret;

	record.node = work->making.node;
	record.parities = work->set.parity;
	group_parity_name(name, record.node);
	ret = group_record_encode(&text, &record);
	if (ret)
		base_no_memory(error, "who protects whom", text.bytes);
	else
		ret = write_file(&target, name, text.bytes + target.bytes, error);
	base_buffer_free(&text);
	return ret;
}

static int make(struct exchanging *exchanging, const struct work *work, struct base_error *error)
{
	struct summing summing = {
		.exchanging = exchanging,
		.work = work,
		.held = { .exchange = exchanging->exchange },
		.message = malloc(MESSAGE_BYTES),
		.sum = malloc(BLOCK_BYTES),
	};
	int ret = 0;

	if (!summing.message || !summing.sum)
		ret = base_no_memory(error, "bytes on their way", MESSAGE_BYTES + BLOCK_BYTES);
	if (!ret && !exchanging->exchange->fresh)
		ret = write_restored(&summing, error);
	if (!ret)
		ret = write_parities(&summing, error);
	if (summing.message && summing.sum)
		skip_rest(&summing);
	else
		atomic_store(&exchanging->exchange->broken, true);
	group_held_close(&summing.held);
	free(summing.message);
	free(summing.sum);
	return ret;
}

static int make_all(struct exchanging *exchanging, struct base_error *error)
{
	int ret = 0;

	for (uint32_t turn = 0; turn < exchanging->turns; turn++) {
		for (uint32_t i = 0; i < exchanging->count; i++) {
			const struct work *work = &exchanging->works[i];
			struct base_error failure = { 0 };

			if (work->making.turn == turn && work->making.target == exchanging->own &&
			    make(exchanging, work, &failure))
				ret = base_pass_on(error, &failure);
		}
	}
	return ret;
}

/* ---- Both ------------------------------------------------------------------------------------ */

static int run_both(struct exchanging *exchanging, struct base_error *error)
{
	pthread_t thread;
	int ret = base_start_thread(&thread, run_sending, exchanging);

	if (ret)
		return base_fail(error, ret, "cannot start a thread that sends to other nodes");
	ret = make_all(exchanging, error);
	pthread_join(thread, NULL);
	if (exchanging->sending.code && (!ret || ret == -ECANCELED)) {
		base_error_begin(error);
		ret = base_pass_on(error, &exchanging->sending);
	}
	return ret;
}

int group_exchange_run(struct group_exchange *exchange, struct ioshape_context *context,
		       struct base_error *error)
{
	struct ioshape_group *group = exchange->round->group;
	struct exchanging exchanging = {
		.exchange = exchange,
		.context = context,
		.own = group->ranks[group->options.rank].node,
	};
	int ret = list_works(&exchanging, error);

	if (!ret && exchanging.count)
		ret = run_both(&exchanging, error);
	free(exchanging.works);
	return ret;
}
