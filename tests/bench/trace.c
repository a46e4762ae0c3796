/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints the address of each function that the library enters in a call.
 *
 *   trace save COORDINATOR PATH   saves one tensor to PATH
 *   trace slot COORDINATOR        takes a slot and releases it
 *
 * The second call is traced, because the first one makes what later calls reuse. The library must
 * be compiled with -finstrument-functions. Addresses are relative to the program, as addr2line
 * expects.
 */
#define _GNU_SOURCE
#include <ioshape/ioshape.h>
#include <ioshape/slots.h>

#include <inttypes.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_FUNCTIONS                                                                             \
	(1u << 14) /* five times the number of the library's functions; a power of two */

static _Atomic(void *) entered[MOST_FUNCTIONS];
static atomic_int tracing;

__attribute__((no_instrument_function)) void __cyg_profile_func_enter(void *function, void *caller);
__attribute__((no_instrument_function)) void __cyg_profile_func_exit(void *function, void *caller);

/* Adds the function to a hash table. Any thread may run this, so an entry is taken by an atomic
 * exchange. */
void __cyg_profile_func_enter(void *function, void *caller)
{
	(void)caller;
	if (!atomic_load_explicit(&tracing, memory_order_relaxed))
		return;
	for (size_t i = ((uintptr_t)function >> 4) % MOST_FUNCTIONS;;
	     i = (i + 1) % MOST_FUNCTIONS) {
		void *empty = NULL;

		if (atomic_compare_exchange_strong(&entered[i], &empty, function) ||
		    empty == function)
			return;
	}
}

void __cyg_profile_func_exit(void *function, void *caller)
{
	(void)function;
	(void)caller;
}

static void fail(const char *what)
{
	fprintf(stderr, "trace: %s: %s\n", what, ioshape_last_error()->sentence);
	exit(1);
}

static void save(struct ioshape_context *context, const char *path)
{
	static float numbers[1024];
	const int64_t shape = 1024;
	const struct ioshape_tensor tensor = { .name = "weight",
					       .dtype = IOSHAPE_FLOAT32,
					       .dims = 1,
					       .shape = &shape,
					       .data = numbers };

	if (ioshape_save_tensors(context, path, &tensor, 1, NULL, NULL))
		fail("the save");
}

static void take_slot(struct ioshape_context *context)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot *slot;

	options.pool = "trace";
	if (ioshape_slot_acquire(context, &options, &slot))
		fail("the slot");
	ioshape_slot_free(slot);
}

static int first_address(struct dl_phdr_info *program, size_t bytes, void *address)
{
	(void)bytes;
	*(uintptr_t *)address = program->dlpi_addr;
	return 1; /* stops at the first entry, which is the program itself */
}

int main(int argc, char **argv)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;
	const int saves = argc == 4 && !strcmp(argv[1], "save");
	uintptr_t base = 0;

	if (!saves && (argc != 3 || strcmp(argv[1], "slot") != 0))
		return 2;
	options.coordinator = argv[2];
	if (ioshape_context_open(&context, &options))
		fail("the context");
	for (int call = 1; call <= 2; call++) {
		atomic_store(&tracing, call == 2);
		if (saves)
			save(context, argv[3]);
		else
			take_slot(context);
	}
	atomic_store(&tracing, 0);
	ioshape_context_free(context);

	dl_iterate_phdr(first_address, &base);
	for (size_t i = 0; i < MOST_FUNCTIONS; i++) {
		if (entered[i])
			printf("%#" PRIxPTR "\n", (uintptr_t)entered[i] - base);
	}
	return 0;
}
