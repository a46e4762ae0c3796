/* SPDX-License-Identifier: Apache-2.0 */
/* Who used a pool, as a caller gets it: in order, in one piece of memory, or not at all. */
#include "slots/slots.h"
#include "support/check_main.h"
#include "support/fail_memory.h"

#include <string.h>

static struct test_case tests = { .name = "history" };

static void add_hour(struct slots_history *history, double begin_s, uint64_t bytes, const char *job)
{
	struct ioshape_pool_hour hour = { .job = job, .user = "u" };

	hour.begin_s = begin_s;
	hour.written_bytes = bytes;
	ck_assert_int_eq(slots_history_add_hour(history, &hour), 0);
}

TEST(tests, hours_are_in_order_of_time_then_of_bytes_then_of_jobs)
{
	struct ioshape_pool_act act = { .who = "root", .what = "capacity 3" };
	struct slots_history history = { 0 };
	struct ioshape_pool_history *told;
	char order[64] = "";

	add_hour(&history, 7200, 5, "e");
	add_hour(&history, 3600, 10, "b");
	add_hour(&history, 3600, 10, "c");
	add_hour(&history, 3600, 20, "a");
	add_hour(&history, 7200, 1, "f");
	add_hour(&history, 3600, 2, "d");
	ck_assert_int_eq(slots_history_add_act(&history, &act), 0);
	told = slots_history_end(&history);
	ck_assert_ptr_nonnull(told);
	for (size_t i = 0; i < told->hour_count; i++) {
		ck_assert_str_eq(told->hours[i].user, "u");
		strcat(order, told->hours[i].job);
	}
	ck_assert_str_eq(order, "abcdef");
	ck_assert_uint_eq(told->act_count, 1);
	ck_assert_str_eq(told->acts[0].who, "root");
	ck_assert_str_eq(told->acts[0].what, "capacity 3");
	ioshape_pool_history_free(told);
	ioshape_pool_history_free(NULL);
}

TEST(tests, nothing_is_a_history_too)
{
	struct slots_history history = { 0 };
	struct ioshape_pool_history *told = slots_history_end(&history);

	ck_assert_ptr_nonnull(told);
	ck_assert_uint_eq(told->hour_count + told->act_count, 0);
	ioshape_pool_history_free(told);
}

TEST(tests, without_memory_there_is_none_and_nothing_is_lost)
{
	struct slots_history history = { 0 };
	struct ioshape_pool_history *told;

	add_hour(&history, 3600, 1, "a");
	fail_memory_at(1);
	told = slots_history_end(&history);
	fail_memory_at(0);
	ck_assert_ptr_null(told);
	told = slots_history_end(&history);
	ck_assert_ptr_nonnull(told);
	ck_assert_str_eq(told->hours[0].job, "a");
	ioshape_pool_history_free(told);
}

int main(void)
{
	return check_run("unit/history");
}
