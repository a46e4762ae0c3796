/* SPDX-License-Identifier: Apache-2.0 */
/* The processes of one host among themselves: the coordinator's functions. */
#include "slots/local.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The first waiter looks so often whether a holder has died; the others less often. */
#define LOOK_MS 20u
#define SLOWEST_LOOK_MS 200u /* several times in LOCAL_LOOK_NS */

/* ---- A pool ---------------------------------------------------------------------------------- */

static void free_pool(struct local_pool *pool)
{
	local_wake_free(pool);
	pthread_mutex_destroy(&pool->lock);
	free(pool);
}

static int local_open(void **out, const struct slots_config *config, struct base_error *error)
{
	const char *folder = config->address + strlen("local");
	struct local_pool *pool;

	*out = NULL;
	if (*folder && (strncmp(folder, ":/", 2) || strlen(folder) > LOCAL_FOLDER_BYTES))
		return base_refuse(
			error, -EINVAL,
			"the coordinator's address begins with \"local\"" BASE_REMEDY
			"say \"local\", or \"local:/FOLDER\" with a path of at most 500 bytes");
	pool = calloc(1, sizeof(*pool));
	if (!pool)
		return base_no_memory(error, "a pool", sizeof(*pool));
	pool->config = *config;
	pool->folder_fd = pool->fd = -1;
	if (local_wake_init(pool)) {
		free(pool);
		return base_no_memory(error, "a pool", 4096);
	}
	if (*folder)
		folder++;
	else
		folder = access("/dev/shm", W_OK | X_OK) ? "/tmp" : "/dev/shm";
	snprintf(pool->folder, sizeof(pool->folder), "%s", folder);
	local_file_name(pool->name, config->pool);
	pthread_mutex_init(&pool->lock, NULL);
	/* Processes that write one file each, one after the other, begin with different slots. */
	pool->turn = (uint32_t)base_random() % LOCAL_SLOTS;
	memcpy(pool->record.job, config->identity.job, sizeof(pool->record.job));
	memcpy(pool->record.node, config->identity.node, sizeof(pool->record.node));
	pool->record.rank = config->identity.rank;
	pool->record.pid = (uint32_t)base_pid();
	*out = pool;
	return 0;
}

static void local_close(void *opaque)
{
	struct local_pool *pool = opaque;

	local_file_close(pool);
	free_pool(pool);
}

/* Takes the pool's lock, with the file open and its head read. */
static int enter(struct local_pool *pool, struct local_head *head, struct base_error *error)
{
	int ret;

	pthread_mutex_lock(&pool->lock);
	pool->finds = 0;
	ret = local_file_ready(pool, head, error);
	if (ret)
		pthread_mutex_unlock(&pool->lock);
	return ret;
}

static void leave(struct local_pool *pool)
{
	pthread_mutex_unlock(&pool->lock);
}

/* ---- Capacity -------------------------------------------------------------------------------- */

static uint32_t capacity_of(const struct local_pool *pool, const struct local_head *head)
{
	const uint32_t capacity = head->set_capacity ? head->set_capacity :
				  head->capacity     ? head->capacity :
						       pool->config.default_capacity;

	return MAX(MIN(capacity, LOCAL_SLOTS), 1u);
}

/* The request that finds a pool idle says what its capacity is, unless an operator does. */
static int choose_capacity(struct local_pool *pool, struct local_head *head,
			   const struct slots_request *request)
{
	const uint32_t asked = pool->config.asked_capacity;
	const uint32_t rule = request->default_capacity ? request->default_capacity :
							  pool->config.default_capacity;
	const uint32_t choice[2] = { asked ? asked : rule, asked != 0 };

	if (head->capacity == choice[0] && head->by_job == choice[1])
		return 0;
	if (head->capacity && !local_is_idle(pool))
		return 0;
	head->capacity = choice[0];
	head->by_job = choice[1];
	return local_write(pool, offsetof(struct local_head, capacity), choice, sizeof(choice));
}

/* ---- Members --------------------------------------------------------------------------------- */

static struct local_member *find(const struct local_pool *pool, const char *id)
{
	struct local_member *member = pool->members;

	while (member && strcmp(member->record.id, id) != 0)
		member = member->next;
	return member;
}

static struct local_member *new_member(struct local_pool *pool, const struct slots_request *request,
				       struct base_error *error)
{
	struct local_member *member = calloc(1, sizeof(*member));
	int fd;

	if (!member) {
		base_no_memory(error, "a request", sizeof(*member));
		return NULL;
	}
	fd = pool->spares ? pool->spare[--pool->spares] : local_file_again(pool);
	if (fd < 0) {
		local_unreachable(pool, "open", fd, error);
		free(member);
		return NULL;
	}
	member->fd = fd;
	member->record = pool->record;
	memcpy(member->record.id, request->id, sizeof(member->record.id));
	member->record.bytes = request->bytes;
	member->record.weight = MAX(request->weight, 1u);
	member->record.urgent = request->urgent;
	member->small = member->record.weight == 1 && !request->urgent && request->bytes &&
			request->bytes <= SLOTS_SMALL_BYTES;
	member->places = MIN(request->default_capacity, SLOTS_MOST_PLACES);
	member->next = pool->members;
	pool->members = member;
	return member;
}

/* ---- Answers --------------------------------------------------------------------------------- */

/* A file's part of the storage targets is that of its slot, so that writers have parts of their
 * own. */
static uint32_t place_of(const struct local_pool *pool, const struct local_member *member)
{
	const bool beside = member->holder == LOCAL_SMALL || member->holder == LOCAL_URGENT;
	const uint32_t slot = beside ? pool->turn : member->holder - LOCAL_FIRST_SLOT;

	return member->places < 2 ? 0 : slot % member->places + 1;
}

static void answer_waiter(struct local_pool *pool, const struct local_member *member,
			  struct slots_answer *answer)
{
	struct local_record record;
	uint32_t ahead;

	answer->state = SLOTS_WAITING;
	answer->position = local_position(pool, member, &ahead);
	answer->beat_ms =
		(uint32_t)MIN(LOOK_MS * ((uint64_t)answer->position + 1), SLOWEST_LOOK_MS);
	if (ahead == LOCAL_RECORDS)
		return;
	local_read_record(pool, ahead, &record);
	if (*record.job)
		snprintf(answer->ahead, sizeof(answer->ahead), "job %.50s, rank %u on %.50s",
			 record.job, record.rank, record.node);
}

/* The member NULL stands for none. */
static void answer_for(struct local_pool *pool, const struct local_member *member,
		       uint32_t capacity, struct slots_answer *answer)
{
	*answer = (struct slots_answer){ .state = SLOTS_NONE, .capacity = capacity };
	if (member && !member->holding)
		answer_waiter(pool, member, answer);
	if (!member || !member->holding)
		return;
	answer->state = SLOTS_HOLDING;
	answer->fence = member->record.number;
	answer->weight = member->given;
	answer->place = place_of(pool, member);
	answer->beat_ms = MAX(pool->config.lease_ms / 3, 1u);
}

/* ---- Operations ------------------------------------------------------------------------------ */

/* Takes what the request needs, or queues it. A member that fails is dropped. */
static int ask(struct local_pool *pool, struct local_member *member, uint32_t capacity,
	       struct base_error *error)
{
	int ret = local_take_at_once(pool, member, capacity);

	if (ret == -EAGAIN)
		ret = local_queue_up(pool, member);
	if (!ret && !member->holding)
		ret = local_look(pool, member, capacity);
	if (!ret || ret == -EAGAIN)
		return 0;
	local_member_free(pool, member);
	if (ret == -E2BIG)
		return base_refuse(error, IOSHAPE_E_COORDINATOR,
				   "cannot queue in pool \"%s\": %u requests wait already",
				   pool->config.pool, LOCAL_WAITERS);
	return local_unreachable(pool, "take a slot in", ret, error);
}

static int acquire(struct local_pool *pool, struct local_head *head,
		   const struct slots_request *request, struct slots_answer *answer,
		   struct base_error *error)
{
	struct local_member *member = find(pool, request->id);
	uint32_t capacity;
	int ret = 0;

	if (!member) {
		ret = choose_capacity(pool, head, request);
		if (ret)
			return local_unreachable(pool, "write", ret, error);
		member = new_member(pool, request, error);
		if (!member)
			return error ? error->code : IOSHAPE_E_COORDINATOR;
		ret = ask(pool, member, capacity_of(pool, head), error);
		if (ret)
			return ret;
	}
	capacity = capacity_of(pool, head);
	if (!member->holding && request->never_wait) {
		local_member_free(pool, member);
		member = NULL;
	}
	answer_for(pool, member, capacity, answer);
	return 0;
}

static int local_acquire(void *opaque, const struct slots_request *request,
			 struct slots_answer *answer, struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_head head;
	int ret = enter(pool, &head, error);

	if (ret)
		return ret;
	ret = acquire(pool, &head, request, answer, error);
	leave(pool);
	return ret;
}

/* A holder shows that it lives; a waiter, too, and looks. -EAGAIN: the request is to be dropped. */
static int renew(struct local_pool *pool, struct local_member *member, uint32_t capacity,
		 uint64_t passed)
{
	const uint64_t now = base_now_ns();
	struct local_record *record = &member->record;
	int ret;

	if (member->holding) {
		/* Others may have passed it over. */
		if (now > record->until_ns)
			return -EAGAIN;
		record->passed = passed;
		record->until_ns = now + base_ms_to_ns(pool->config.lease_ms);
		return local_write_record(pool, member->holder, record);
	}
	record->until_ns = now + LOCAL_LOOK_NS;
	ret = local_write_record(
		pool,
		local_ticket_record(member->record.urgent ? LOCAL_URGENT_LINE : LOCAL_LINE,
				    member->ticket),
		record);
	if (!ret)
		ret = local_look(pool, member, capacity);
	return ret == -EAGAIN ? 0 : ret;
}

static int local_beat(void *opaque, const struct slots_beat *beat, struct slots_answer *answer,
		      struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_member *member;
	struct local_head head;
	uint32_t capacity;
	int ret = enter(pool, &head, error);

	if (ret)
		return ret;
	capacity = capacity_of(pool, &head);
	member = find(pool, beat->id);
	if (member)
		ret = renew(pool, member, capacity, beat->passed);
	if (ret == -EAGAIN) {
		local_member_free(pool, member);
		member = NULL;
		ret = 0;
	}
	if (ret)
		ret = local_unreachable(pool, "renew a request in", ret, error);
	else
		answer_for(pool, member, capacity, answer);
	leave(pool);
	return ret;
}

static int local_release(void *opaque, const char *id, uint64_t passed, struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_member *member;

	(void)passed, (void)error;
	pthread_mutex_lock(&pool->lock);
	pool->finds = 0;
	member = find(pool, id);
	if (member)
		local_member_free(pool, member);
	leave(pool);
	return 0;
}

/* ---- What needs a Redis ---------------------------------------------------------------------- */

static int needs_redis(const struct local_pool *pool, const char *what, struct base_error *error)
{
	return base_refuse(error, -ENOTSUP,
			   "pool \"%s\" of this host has no %s" BASE_REMEDY
			   "use a Redis as coordinator, also on one host",
			   pool->config.pool, what);
}

static int local_kick(void *opaque, const char *id, struct base_error *error)
{
	const struct local_pool *pool = opaque;

	(void)id;
	return base_refuse(
		error, -ENOTSUP,
		"pool \"%s\" of this host cannot take a slot away from a process" BASE_REMEDY
		"end that process; the pool's status has its number",
		pool->config.pool);
}

static int local_set(void *opaque, const struct ioshape_pool_settings *settings,
		     struct base_error *error)
{
	const uint32_t capacity = settings->capacity;
	struct local_pool *pool = opaque;
	struct local_head head;
	int ret;

	if (settings->job || settings->user || settings->pool_bytes_per_s ||
	    settings->job_bytes_per_s || settings->small_bytes || settings->express)
		return needs_redis(pool, "setting but the capacity", error);
	if (capacity > LOCAL_SLOTS)
		return base_refuse(error, -EINVAL,
				   "the capacity is %u" BASE_REMEDY
				   "a pool of one host takes 1 to %u",
				   capacity, LOCAL_SLOTS);
	ret = enter(pool, &head, error);
	if (ret)
		return ret;
	if (capacity || settings->clear)
		ret = local_write(pool, offsetof(struct local_head, set_capacity), &capacity,
				  sizeof(capacity));
	leave(pool);
	local_wake(pool);
	return ret ? local_unreachable(pool, "write", ret, error) : 0;
}

/* ---- Status ---------------------------------------------------------------------------------- */

struct listing {
	struct local_pool *pool;
	struct ioshape_pool_status *status;
	enum local_line line;
	uint64_t now_ns;
	uint32_t count;
	uint32_t numbers[LOCAL_HOLDERS]; /* of holders, each once */
	uint64_t fences[LOCAL_HOLDERS];
};

static void add_row(const struct listing *listing, uint32_t number, bool holds)
{
	const uint64_t now = listing->now_ns;
	struct local_record record;
	struct ioshape_member row;

	local_read_record(listing->pool, number, &record);
	row = (struct ioshape_member){
		.id = record.id,
		.job = record.job,
		.node = record.node,
		.rank = record.rank,
		.pid = record.pid,
		.weight = record.weight,
		.express = holds && number == LOCAL_SMALL,
		.urgent = record.urgent != 0,
		.expected_bytes = record.bytes,
		.written_bytes = holds ? record.passed : 0,
		.fence = holds ? record.number : 0,
		.since_s = base_seconds(now - MIN(record.since_ns, now)),
		.lease_s = base_seconds(MAX(record.until_ns, now) - now),
	};
	slots_status_add(listing->status, holds, &row);
}

/* Of several slots that a request holds, one has its record. */
static void note_holder(void *user, uint64_t number)
{
	struct listing *listing = user;
	struct local_record record;
	uint32_t at = listing->count;

	listing->status->used += number != LOCAL_SMALL;
	local_read_record(listing->pool, (uint32_t)number, &record);
	if (record.first != number)
		return;
	for (; at && listing->fences[at - 1] > record.number; at--) {
		listing->fences[at] = listing->fences[at - 1];
		listing->numbers[at] = listing->numbers[at - 1];
	}
	listing->fences[at] = record.number;
	listing->numbers[at] = (uint32_t)number;
	listing->count++;
}

static void note_waiter(void *user, uint64_t ticket)
{
	struct listing *listing = user;

	listing->status->waiter_count++;
	add_row(listing, local_ticket_record(listing->line, ticket), false);
}

static void fill_status(struct local_pool *pool, const struct local_head *head,
			struct ioshape_pool_status *status)
{
	struct listing listing = { .pool = pool, .status = status, .now_ns = base_now_ns() };

	status->capacity = capacity_of(pool, head);
	status->capacity_by = head->set_capacity ? "operator" : head->by_job ? "job" : "default";
	status->small_bytes = SLOTS_SMALL_BYTES;
	status->express = SLOTS_EXPRESS;
	local_each(pool, LOCAL_HOLDER_LINE, note_holder, &listing);
	status->holder_count = listing.count;
	for (uint32_t i = 0; i < listing.count; i++)
		add_row(&listing, listing.numbers[i], true);
	for (listing.line = LOCAL_URGENT_LINE; listing.line <= LOCAL_LINE; listing.line++)
		local_each(pool, listing.line, note_waiter, &listing);
}

static int local_status(void *opaque, struct ioshape_pool_status **status, struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_head head;
	int ret = slots_status_new(status, pool->config.pool, "local", error);

	if (ret)
		return ret;
	ret = enter(pool, &head, error);
	if (!ret) {
		fill_status(pool, &head, *status);
		leave(pool);
		return 0;
	}
	ioshape_pool_status_free(*status);
	*status = NULL;
	return ret;
}

const struct slots_ops slots_local = {
	.id = "local",
	.open = local_open,
	.acquire = local_acquire,
	.beat = local_beat,
	.release = local_release,
	.wait = local_wait,
	.interrupt = local_wake,
	.set = local_set,
	.kick = local_kick,
	.status = local_status,
	.names = local_names,
	.close = local_close,
};
