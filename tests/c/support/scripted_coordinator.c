/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/scripted_coordinator.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static struct {
	pthread_mutex_t lock;
	pthread_cond_t change;
	struct script script;
	struct script_counts counts;
	uint64_t fence;
	uint64_t free_ns; /* time from which the bandwidth is free */
	bool changed, interrupted;
} state = { .lock = PTHREAD_MUTEX_INITIALIZER };

static int begin(struct base_error *error)
{
	struct script script;

	pthread_mutex_lock(&state.lock);
	script = state.script;
	pthread_mutex_unlock(&state.lock);
	if (script.silence_ms)
		usleep(script.silence_ms * 1000);
	return script.unreachable ?
		       base_fail(error, IOSHAPE_E_COORDINATOR, "the script says unreachable") :
		       0;
}

static int scripted_open(void **pool, const struct slots_config *config, struct base_error *error)
{
	(void)config, (void)error;
	*pool = NULL;
	return 0;
}

static void answer_as(enum slots_state what, struct slots_answer *answer)
{
	*answer = (struct slots_answer){
		.state = what,
		.weight = 1,
		.epoch = 1,
		.fence = what == SLOTS_HOLDING ? ++state.fence : 0,
		.position = state.script.position,
		.capacity = state.script.capacity,
		.beat_ms = state.script.beat_ms,
	};
	if (what == SLOTS_WAITING)
		snprintf(answer->ahead, sizeof(answer->ahead), "job J, rank 7 on n03");
}

static int scripted_acquire(void *pool, const struct slots_request *request,
			    struct slots_answer *answer, struct base_error *error)
{
	int ret = begin(error);

	(void)pool;
	pthread_mutex_lock(&state.lock);
	state.counts.acquires++;
	state.counts.boost_ms = request->boost_ms;
	if (!ret)
		answer_as(state.script.acquired, answer);
	pthread_mutex_unlock(&state.lock);
	return ret;
}

static int scripted_beat(void *pool, const struct slots_beat *beat, struct slots_answer *answer,
			 struct base_error *error)
{
	int ret = begin(error);

	(void)pool;
	pthread_mutex_lock(&state.lock);
	state.counts.beats++;
	state.counts.passed = beat->passed;
	state.counts.holding = beat->holding;
	if (!ret)
		answer_as(state.script.beaten, answer);
	pthread_mutex_unlock(&state.lock);
	return ret;
}

static int scripted_release(void *pool, const char *id, uint64_t passed, struct base_error *error)
{
	int ret = begin(error);

	(void)pool;
	pthread_mutex_lock(&state.lock);
	if (!ret) {
		state.counts.releases++;
		state.counts.passed = passed;
		snprintf(state.counts.released, sizeof(state.counts.released), "%s", id);
	}
	pthread_mutex_unlock(&state.lock);
	return ret;
}

static int scripted_wait(void *pool, uint32_t timeout_ms, struct base_error *error)
{
	const uint64_t until = base_now_ns() + timeout_ms * 1000000ull;
	int ret;

	(void)pool;
	pthread_mutex_lock(&state.lock);
	state.counts.waits++;
	if (state.script.deaf) {
		pthread_mutex_unlock(&state.lock);
		return base_fail(error, IOSHAPE_E_COORDINATOR, "the script is deaf");
	}
	while (!state.changed && !state.interrupted && !state.script.floods &&
	       base_now_ns() < until)
		base_cond_wait_ms(&state.change, &state.lock, 5);
	state.changed = state.interrupted = false;
	pthread_mutex_unlock(&state.lock);
	ret = begin(error);
	return ret;
}

static void scripted_interrupt(void *pool)
{
	(void)pool;
	pthread_mutex_lock(&state.lock);
	state.interrupted = true;
	pthread_cond_broadcast(&state.change);
	pthread_mutex_unlock(&state.lock);
}

static void scripted_rest(void *pool)
{
	(void)pool;
	pthread_mutex_lock(&state.lock);
	state.counts.rests++;
	pthread_mutex_unlock(&state.lock);
}

static int scripted_pace(void *pool, uint64_t bytes, uint64_t most, struct slots_grant *grant,
			 struct base_error *error)
{
	int ret = begin(error);
	uint64_t now = base_now_ns();

	(void)pool, (void)most;
	pthread_mutex_lock(&state.lock);
	state.counts.paces++;
	*grant = (struct slots_grant){ .end_ms = 50 };
	if (!ret && state.script.rate) {
		state.free_ns = MAX(state.free_ns, now);
		*grant = (struct slots_grant){
			.bytes = bytes,
			.start_ms = (uint32_t)((state.free_ns - now) / 1000000),
		};
		state.free_ns += bytes * 1000000000ull / state.script.rate;
		grant->end_ms = (uint32_t)((state.free_ns - now) / 1000000);
	}
	pthread_mutex_unlock(&state.lock);
	return ret;
}

static void scripted_close(void *pool)
{
	(void)pool;
}

const struct slots_ops script_coordinator = {
	.id = "test",
	.open = scripted_open,
	.acquire = scripted_acquire,
	.beat = scripted_beat,
	.release = scripted_release,
	.wait = scripted_wait,
	.interrupt = scripted_interrupt,
	.rest = scripted_rest,
	.pace = scripted_pace,
	.close = scripted_close,
};

void script_install(const struct script *script)
{
	pthread_mutex_lock(&state.lock);
	state.script = *script;
	state.counts = (struct script_counts){ 0 };
	state.changed = state.interrupted = false;
	state.free_ns = 0;
	pthread_mutex_unlock(&state.lock);
	base_cond_init(&state.change);
}

void script_change(const struct script *script)
{
	pthread_mutex_lock(&state.lock);
	state.script = *script;
	state.changed = true;
	pthread_cond_broadcast(&state.change);
	pthread_mutex_unlock(&state.lock);
}

struct script_counts script_counts(void)
{
	struct script_counts counts;

	pthread_mutex_lock(&state.lock);
	counts = state.counts;
	pthread_mutex_unlock(&state.lock);
	return counts;
}
