/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes make elements together. All of them go through the same list, block by block: for each
 * element that is made, those that it is the sum of. Whoever holds one of these sends it, on a
 * thread of its own, and the target adds them up. The first transfer of the list that has not
 * happened is always the next one for both its sides, so nobody waits for ever. So also a side that
 * has failed goes through all of it: only when bytes do not travel any more it ends.
 */
#define _GNU_SOURCE
#include "tier/parity.h"
#include "tier/tier.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The files of a node that lie here, while one thread reads them. */
struct held {
	const struct parity_exchange *exchange;
	bool is_open;
	uint32_t node;
	struct parity_set set;
	uint64_t segment_bytes;
	uint32_t count; /* of its files */
	struct held_file {
		struct io_input input;
		uint64_t at; /* where it begins among all of them */
	} * files;
	struct io_input parity; /* its path is NULL before it is open */
	uint64_t parity_at;     /* where the first begins */
};

/* ---- Elements that lie here ------------------------------------------------------------------ */

static void held_close(struct held *held)
{
	const struct parity_exchange *exchange = held->exchange;

	while (held->count)
		io_input_close(&held->files[--held->count].input);
	free(held->files);
	if (held->parity.path)
		io_input_close(&held->parity);
	*held = (struct held){ .exchange = exchange };
}

static int open_input(const struct parity_exchange *exchange, const char *name,
		      struct io_input *input, struct base_error *error)
{
	char *path;
	int ret;

	if (asprintf(&path, "%s/%s", exchange->folder, name) < 0)
		return base_no_memory(error, "a path", strlen(exchange->folder));
	ret = io_input_open(input, path, 0, 0, IOSHAPE_DIRECT_OFF, error);
	free(path);
	return ret;
}

static int open_files(struct held *held, struct base_error *error)
{
	const struct format_manifest *manifest = held->exchange->manifest;
	uint64_t at = 0;
	int ret = 0;

	held->files = calloc(manifest->file_count, sizeof(*held->files));
	if (!held->files)
		return base_no_memory(error, "files of a node",
				      manifest->file_count * sizeof(*held->files));
	for (uint32_t i = 0; !ret && i < manifest->file_count; i++) {
		if (held->exchange->record->node_of_file[i] != held->node)
			continue;
		held->files[held->count].at = at;
		ret = open_input(held->exchange, manifest->files[i].name,
				 &held->files[held->count].input, error);
		held->count += !ret;
		at += manifest->files[i].bytes;
	}
	return ret;
}

/* Of a node whose parities are being made there is no such file yet. */
static int open_parity(struct held *held, struct base_error *error)
{
	char name[GROUP_PARITY_NAME_BYTES];
	uint8_t begin[PARITY_RECORD_UNIT];
	int ret;

	if (held->parity.path)
		return 0;
	group_parity_name(name, held->node);
	ret = open_input(held->exchange, name, &held->parity, error);
	if (ret)
		return ret;
	ret = io_input_get(&held->parity, 0, begin, sizeof(begin), error);
	held->parity_at = ret ? 0 : parity_record_bytes(begin, sizeof(begin));
	if (!ret && !held->parity_at)
		ret = base_refuse(error, IOSHAPE_E_DAMAGED,
				  "\"%s\" does not begin as a file of parities", held->parity.path);
	return ret;
}

static int be(struct held *held, uint32_t node, struct base_error *error)
{
	const struct parity_exchange *exchange = held->exchange;

	if (held->is_open && held->node == node)
		return 0;
	held_close(held);
	held->is_open = true;
	held->node = node;
	held->set = parity_set_of(&exchange->record->sets, node);
	held->segment_bytes =
		parity_segment_bytes(exchange->manifest, exchange->record, &held->set);
	return open_files(held, error);
}

/* ---- Reading --------------------------------------------------------------------------------- */

static int get_from_files(const struct held *held, uint64_t at, uint8_t *into, size_t bytes,
			  struct base_error *error)
{
	int ret = 0;

	memset(into, 0, bytes);
	for (uint32_t i = 0; !ret && i < held->count; i++) {
		const struct held_file *file = &held->files[i];
		const uint64_t begin = MAX(file->at, at),
			       end = MIN(file->at + file->input.bytes, at + bytes);

		if (begin < end)
			ret = io_input_get(&file->input, begin - file->at, into + (begin - at),
					   end - begin, error);
	}
	return ret;
}

/* Bytes of an element of a node; there are zeros behind its last file. The files stay open until
 * those of another node are wanted. */
static int held_get(struct held *held, uint32_t node, uint32_t element, uint64_t offset, void *into,
		    size_t bytes, struct base_error *error)
{
	uint32_t segments;
	int ret = be(held, node, error);

	if (ret)
		return ret;
	segments = parity_segments_of(&held->set);
	if (element < segments)
		return get_from_files(held, element * held->segment_bytes + offset, into, bytes,
				      error);
	ret = open_parity(held, error);
	return ret ? ret :
		     io_input_get(&held->parity,
				  held->parity_at + (element - segments) * held->segment_bytes +
					  offset,
				  into, bytes, error);
}

/* ---- The list: what is made, in the order in which all nodes go through it ------------------- */

#define BLOCK_BYTES (4 * MIB)
/* Behind each block its checksum. */
#define MESSAGE_BYTES (BLOCK_BYTES + 4)

/* What this node has to do with: of another set it needs nothing, and sends it nothing. */
struct parity_work {
	struct parity_making making;
	struct parity_set set;
	uint64_t segment_bytes;
	uint32_t first, count; /* elements that are made */
	uint64_t blocks;       /* of each */
};

static uint32_t rank_of(const struct parity_exchange *exchange, uint32_t node)
{
	return exchange->round->group->leaders[node];
}

static uint32_t tag_of(const struct parity_exchange *exchange)
{
	const struct group_round *round = exchange->round;

	return (uint32_t)((round->group->id % 16384 + round->number) % 16384);
}

/* How long one block may take. A rank that waits for longer than its group's deadline says nothing
 * meanwhile, and would be lost to the group, too. */
static uint32_t patience_ms(const struct parity_exchange *exchange)
{
	return exchange->round->group->options.deadline_ms / 2;
}

static uint64_t steps_of(const struct parity_work *work)
{
	return work->count * work->blocks;
}

static bool concerns(const struct parity_exchange *exchange, const struct parity_work *work)
{
	bool concerned = work->making.target == exchange->own;

	for (uint32_t i = 0; i < work->set.count; i++)
		concerned |= exchange->holders[work->set.nodes[i]] == exchange->own;
	return concerned;
}

static struct parity_work work_for(const struct parity_exchange *exchange,
				   const struct parity_making *making)
{
	struct parity_work work = {
		.making = *making,
		.set = parity_set_of(&exchange->record->sets, making->node),
	};

	work.segment_bytes = parity_segment_bytes(exchange->manifest, exchange->record, &work.set);
	work.first = exchange->fresh ? parity_segments_of(&work.set) : 0;
	work.count = parity_segments_of(&work.set) + work.set.parity - work.first;
	work.blocks = (work.segment_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
	return work;
}

static int list_works(struct parity_exchange *exchange, struct base_error *error)
{

	exchange->works = calloc(MAX(exchange->count, 1), sizeof(*exchange->works));
	if (!exchange->works)
		return base_no_memory(error, "what nodes send each other",
				      exchange->count * sizeof(*exchange->works));
	for (uint32_t i = 0; i < exchange->count; i++) {
		const struct parity_work work = work_for(exchange, &exchange->makings[i]);

		if (!concerns(exchange, &work))
			continue;
		exchange->works[exchange->work_count++] = work;
		exchange->turns = MAX(exchange->turns, work.making.turn + 1);
		exchange->most_steps = MAX(exchange->most_steps, steps_of(&work));
	}
	return 0;
}

/* One block of one element. */
struct step {
	uint32_t element;
	uint64_t offset;
	size_t bytes;
};

static struct step step_at(const struct parity_work *work, uint64_t number)
{
	struct step step = {
		.element = work->first + (uint32_t)(number / work->blocks),
		.offset = number % work->blocks * BLOCK_BYTES,
	};

	step.bytes = MIN(BLOCK_BYTES, work->segment_bytes - step.offset);
	return step;
}

static int find_sources(const struct parity_exchange *exchange, const struct parity_work *work,
			uint32_t element, struct parity_source sources[PARITY_MOST_DATA],
			uint32_t *count, struct base_error *error)
{

	if (!parity_find_sources(&work->set, exchange->holders, exchange->parities, element,
				 exchange->fresh, sources, count))
		return 0;
	return base_refuse(error, -ENODATA,
			   "too many nodes are lost to restore what node %u had of generation %llu",
			   work->making.node, (unsigned long long)exchange->manifest->step);
}

/* ---- Sending --------------------------------------------------------------------------------- */

/* What cannot be read goes with a checksum that says so. */
static int send_block(struct parity_exchange *exchange, struct held *held,
		      const struct parity_work *work, const struct parity_source *source,
		      const struct step *step, uint8_t *message, struct base_error *error)
{
	const struct ioshape_group_options *options = &exchange->round->group->options;
	const uint32_t to = rank_of(exchange, work->making.target);
	uint32_t crc;
	int sent, ret = held_get(held, source->node, source->element, step->offset, message,
				 step->bytes, error);

	crc = base_crc32(0, message, step->bytes);
	base_put_le(message + step->bytes, ret ? ~crc : crc, 4);
	sent = options->comm->send(options->comm->user, to, tag_of(exchange), message,
				   step->bytes + 4, patience_ms(exchange));
	if (!sent)
		return ret;
	atomic_store(&exchange->broken, true);
	return base_fail(error, sent, "cannot send what protects a generation to rank %u", to);
}

static int send_step(struct parity_exchange *exchange, struct held *held,
		     const struct parity_work *work, uint64_t number, uint8_t *message,
		     struct base_error *error)
{
	const uint32_t *holders = exchange->holders;
	const struct step step = step_at(work, number);
	struct parity_source sources[PARITY_MOST_DATA];
	uint32_t count;
	int ret = find_sources(exchange, work, step.element, sources, &count, error);

	for (uint32_t i = 0; i < count && !atomic_load(&exchange->broken); i++) {
		if (holders[sources[i].node] == exchange->own &&
		    work->making.target != exchange->own &&
		    send_block(exchange, held, work, &sources[i], &step, message, error))
			ret = error->code;
	}
	return ret;
}

/* What fails first is told. */
static void send_all(struct parity_exchange *exchange, uint8_t *message, struct base_error *error)
{
	struct held held = { .exchange = exchange };

	for (uint32_t turn = 0; turn < exchange->turns; turn++) {
		for (uint64_t number = 0; number < exchange->most_steps; number++) {
			for (uint32_t i = 0; i < exchange->work_count; i++) {
				const struct parity_work *work = &exchange->works[i];
				struct base_error failure = { 0 };

				if (atomic_load(&exchange->broken))
					goto out;
				if (work->making.turn == turn && number < steps_of(work) &&
				    send_step(exchange, &held, work, number, message, &failure))
					base_pass_on(error, &failure);
			}
		}
	}
out:
	held_close(&held);
}

static void *run_sending(void *user)
{
	struct parity_exchange *exchange = user;
	struct base_error error = { 0 };
	uint8_t *message = calloc(1, MESSAGE_BYTES); /* also what cannot be read is sent */

	if (message) {
		send_all(exchange, message, &error);
	} else {
		atomic_store(&exchange->broken, true);
		base_no_memory(&error, "bytes on their way", MESSAGE_BYTES);
	}
	free(message);
	exchange->sending = error;
	return NULL;
}

/* ---- Adding up ------------------------------------------------------------------------------- */

/* What one target gets, one block after the other. */
struct summing {
	struct parity_exchange *exchange;
	const struct parity_work *work;
	struct held held;
	uint64_t next;    /* step */
	uint8_t *message; /* one that comes */
	uint8_t *sum;
	size_t at, bytes; /* of the sum: what has been taken, and what there is */
};

static int receive(struct summing *summing, uint32_t from, size_t bytes, struct base_error *error)
{
	struct parity_exchange *exchange = summing->exchange;
	const struct ioshape_group_options *options = &exchange->round->group->options;
	const int ret = options->comm->receive(options->comm->user, from, tag_of(exchange),
					       summing->message, bytes + 4, patience_ms(exchange));

	if (ret) {
		atomic_store(&exchange->broken, true);
		return base_fail(error, ret,
				 "cannot receive what protects a generation from rank %u", from);
	}
	if (base_crc32(0, summing->message, bytes) == base_get_le(summing->message + bytes, 4))
		return 0;
	return base_refuse(error, -EIO,
			   "rank %u cannot read its files, or they were damaged on their way",
			   from);
}

static int add_source(struct summing *summing, const struct parity_source *source,
		      const struct step *step, struct base_error *error)
{
	const struct parity_exchange *exchange = summing->exchange;
	const uint32_t holder = exchange->holders[source->node];
	int ret;

	if (holder == exchange->own)
		ret = held_get(&summing->held, source->node, source->element, step->offset,
			       summing->message, step->bytes, error);
	else
		ret = receive(summing, rank_of(exchange, holder), step->bytes, error);
	if (!ret)
		parity_add(summing->sum, summing->message, step->bytes, source->coefficient);
	return ret;
}

static bool is_broken(const struct summing *summing)
{
	return atomic_load(&summing->exchange->broken);
}

/* All that is sent for it is received, whatever becomes of it. */
static int next_block(struct summing *summing, struct base_error *error)
{
	const struct step step = step_at(summing->work, summing->next++);
	struct parity_source sources[PARITY_MOST_DATA];
	uint32_t count;
	int ret = find_sources(summing->exchange, summing->work, step.element, sources, &count,
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
	group_round_beat(summing->exchange->round);
	return ret;
}

/* After a failure: the others send it all the same. */
static void skip_rest(struct summing *summing)
{
	while (summing->next < steps_of(summing->work) && !is_broken(summing))
		next_block(summing, NULL);
}

/* The next bytes that follow; without a file they are passed over. */
static int put_next(struct summing *summing, struct io_writer *file, uint64_t bytes,
		    struct base_error *error)
{
	int ret = 0;

	while (!ret && bytes) {
		size_t piece;

		if (summing->at == summing->bytes)
			ret = next_block(summing, error);
		piece = MIN(summing->bytes - summing->at, bytes);
		if (!ret && file)
			ret = io_writer_put(file, summing->sum + summing->at, piece, NULL, error);
		summing->at += piece;
		bytes -= piece;
	}
	return ret;
}

/* ---- Files ----------------------------------------------------------------------------------- */

struct target_file {
	struct summing *summing;
	const struct format_manifest_file *restored; /* NULL: it is that of the parities */
	const struct base_buffer *record;
	uint64_t bytes; /* of parities */
	const char *path;
};

static int put_file(void *user, struct io_writer *writer, struct base_error *error)
{
	const struct target_file *file = user;
	int ret = 0;

	if (file->restored)
		ret = put_next(file->summing, writer, file->restored->bytes, error);
	else
		ret = io_writer_put(writer, file->record->data, file->record->bytes, NULL, error);
	if (!ret && !file->restored)
		ret = put_next(file->summing, writer, file->bytes, error);
	if (ret || !file->restored || io_writer_crc32(writer) == file->restored->crc32)
		return ret;
	return base_refuse(error, IOSHAPE_E_DAMAGED,
			   "\"%s\" was restored from other nodes, and its checksum is another: one "
			   "of their copies is damaged",
			   file->path);
}

static int write_file(struct target_file *target, const char *name, uint64_t bytes,
		      struct base_error *error)
{
	const struct parity_exchange *exchange = target->summing->exchange;
	const pthread_t self = pthread_self();
	const struct save_watch watch = { .blocked = &self };
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct save_file file = {
		.context = exchange->round->group->context,
		.options = { .expected_bytes = bytes, .exact = true, .want_crc32 = true },
		/* Nodes wait for each other's blocks: none of them may wait for its turn. */
		.without_slot = true,
		.put = put_file,
		.user = target,
	};
	char *path;
	int ret;

	if (asprintf(&path, "%s/%s", exchange->folder, name) < 0)
		return base_no_memory(error, "a path", strlen(name));
	target->path = file.path = path;
	ret = save_write_file(&file, &watch, NULL, &report, error);
	free(path);
	return ret;
}

/* Those of the manifest, in their order, and what is left of the last segment. */
static int write_restored(struct summing *summing, struct base_error *error)
{
	const struct parity_exchange *exchange = summing->exchange;
	const struct parity_work *work = summing->work;
	uint64_t left = work->segment_bytes * parity_segments_of(&work->set);
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
	const struct parity_work *work = summing->work;
	struct parity_record record = *summing->exchange->record;
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
	ret = parity_record_encode(&text, &record);
	if (ret)
		base_no_memory(error, "who protects whom", text.bytes);
	else
		ret = write_file(&target, name, text.bytes + target.bytes, error);
	base_buffer_free(&text);
	return ret;
}

static int make(struct parity_exchange *exchange, const struct parity_work *work,
		struct base_error *error)
{
	struct summing summing = {
		.exchange = exchange,
		.work = work,
		.held = { .exchange = exchange },
		.message = malloc(MESSAGE_BYTES),
		.sum = malloc(BLOCK_BYTES),
	};
	int ret = 0;

	if (!summing.message || !summing.sum)
		ret = base_no_memory(error, "bytes on their way", MESSAGE_BYTES + BLOCK_BYTES);
	if (!ret && !exchange->fresh)
		ret = write_restored(&summing, error);
	if (!ret)
		ret = write_parities(&summing, error);
	if (summing.message && summing.sum)
		skip_rest(&summing);
	else
		atomic_store(&exchange->broken, true);
	held_close(&summing.held);
	free(summing.message);
	free(summing.sum);
	return ret;
}

static int make_all(struct parity_exchange *exchange, struct base_error *error)
{
	int ret = 0;

	for (uint32_t turn = 0; turn < exchange->turns; turn++) {
		for (uint32_t i = 0; i < exchange->work_count; i++) {
			const struct parity_work *work = &exchange->works[i];
			struct base_error failure = { 0 };

			if (work->making.turn == turn && work->making.target == exchange->own &&
			    make(exchange, work, &failure))
				ret = base_pass_on(error, &failure);
		}
	}
	return ret;
}

/* ---- Both ------------------------------------------------------------------------------------ */

static int run_both(struct parity_exchange *exchange, struct base_error *error)
{
	pthread_t thread;
	int ret = base_start_thread(&thread, run_sending, exchange);

	if (ret)
		return base_fail(error, ret, "cannot start a thread that sends to other nodes");
	ret = make_all(exchange, error);
	pthread_join(thread, NULL);
	if (exchange->sending.code && (!ret || ret == -ECANCELED)) {
		base_error_begin(error);
		ret = base_pass_on(error, &exchange->sending);
	}
	return ret;
}

int parity_exchange_run(struct parity_exchange *exchange, struct base_error *error)
{
	struct ioshape_group *group = exchange->round->group;
	int ret;

	exchange->own = group->ranks[group->options.rank].node;
	ret = list_works(exchange, error);
	if (!ret && exchange->work_count)
		ret = run_both(exchange, error);
	group->comm_failed |= atomic_load(&exchange->broken);
	free(exchange->works);
	return ret;
}
