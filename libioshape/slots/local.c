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

/* Finds the folder of an address: "local", or "local:/FOLDER". */
static int find_folder(const char *address, char folder[LOCAL_FOLDER_BYTES],
		       struct base_error *error)
{
	const char *given = address + strlen("local");

	if (*given && (strncmp(given, ":/", 2) || strlen(given) > LOCAL_FOLDER_BYTES))
		return base_refuse(
			error, -EINVAL,
			"the coordinator's address begins with \"local\"" BASE_REMEDY
			"say \"local\", or \"local:/FOLDER\" with a path of at most 500 bytes");
	if (*given)
		given++;
	else
		given = access("/dev/shm", W_OK | X_OK) ? "/tmp" : "/dev/shm";
	snprintf(folder, LOCAL_FOLDER_BYTES, "%s", given);
	return 0;
}

static int local_open(void **out, const struct slots_config *config, struct base_error *error)
{
	char folder[LOCAL_FOLDER_BYTES];
	struct local_pool *pool;

	*out = NULL;
	if (find_folder(config->address, folder, error))
		return -EINVAL;
	pool = calloc(1, sizeof(*pool));
	if (!pool)
		return base_no_memory(error, "a pool", sizeof(*pool));
	pool->config = *config;
	pool->folder_fd = pool->fd = -1;
	if (local_wake_init(pool)) {
		free(pool);
		return base_no_memory(error, "a pool", 4096);
	}
	memcpy(pool->folder, folder, sizeof(pool->folder));
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
static int enter(struct local_pool *pool, struct slots_file_head *head, struct base_error *error)
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

static uint32_t capacity_of(const struct local_pool *pool, const struct slots_file_head *head)
{
	const uint32_t capacity = head->capacity ? head->capacity : pool->config.default_capacity;

	return MAX(MIN(capacity, LOCAL_SLOTS), 1u);
}

/* The request that finds a pool idle says what its capacity is. */
static int choose_capacity(struct local_pool *pool, struct slots_file_head *head,
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
	return local_write(pool, offsetof(struct slots_file_head, capacity), choice,
			   sizeof(choice));
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
	struct slots_file_record record;
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

static int acquire(struct local_pool *pool, struct slots_file_head *head,
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
	struct slots_file_head head;
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
	struct slots_file_record *record = &member->record;
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
	struct slots_file_head head;
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

/* ---- For the operator's calls in Python ------------------------------------------------------ */

static int local_describe(const struct slots_config *config, struct slots_coordinator *found,
			  struct base_error *error)
{
	int ret = find_folder(config->address, found->folder, error);

	found->id = slots_local.id;
	local_file_name(found->file, config->pool);
	found->version = LOCAL_VERSION;
	for (int line = 0; line <= LOCAL_LINES; line++)
		found->locks[line] = (uint64_t)local_begin_of_line((enum local_line)line);
	found->holders = LOCAL_HOLDERS;
	found->small_bytes = SLOTS_SMALL_BYTES;
	found->express = SLOTS_EXPRESS;
	return ret;
}

const struct slots_ops slots_local = {
	.id = "local",
	.open = local_open,
	.acquire = local_acquire,
	.beat = local_beat,
	.release = local_release,
	.wait = local_wait,
	.interrupt = local_interrupt,
	.close = local_close,
	.describe = local_describe,
};
