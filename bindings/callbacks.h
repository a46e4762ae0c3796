/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Declarations that cffi reads: callbacks from C into Python (extern "Python") and the functions of
 * native.h that Python calls or passes to the library. Threads of the library call some callbacks.
 */

extern "Python" int ioshape_py_progress(void *user, enum ioshape_phase phase, uint64_t done_bytes,
					uint64_t total_bytes);
/* Calls ioshape_py_progress(), but only in the staging phase: see native.h. */
int ioshape_py_progress_of_stage(void *user, enum ioshape_phase phase, uint64_t done_bytes,
				 uint64_t total_bytes);
/* Returns *(int *)user, which stops the drain unless it is 0: see native.h. */
int ioshape_py_progress_until(void *user, enum ioshape_phase phase, uint64_t done_bytes,
			      uint64_t total_bytes);
/* Replaces an exit status of 0 by this status; 0 leaves it. See native.h. */
void ioshape_py_end_with(int status);
extern "Python" void ioshape_py_on_log(void *user, enum ioshape_log_level level,
				       const char *message);
/* Calls ioshape_py_on_log() until ioshape_py_end_log() is called: see native.h. */
void ioshape_py_log(void *user, enum ioshape_log_level level, const char *message);
void ioshape_py_end_log(void);
extern "Python" int ioshape_py_fetch(void *user, uint64_t offset, void *into, size_t bytes);
/* Copies the memory that `user` points to: an ioshape_fetch_fn. */
int ioshape_py_copy(void *user, uint64_t offset, void *into, size_t bytes);
extern "Python" int ioshape_py_queue(void *user, const struct ioshape_place *place);
extern "Python" void ioshape_py_tensor_name(void *user, const char *record, char *name,
					    size_t bytes);
extern "Python" void ioshape_py_removing(void *user, uint64_t step, uint64_t bytes);
extern "Python" void ioshape_py_passed_over(void *user, uint64_t step);
extern "Python" void ioshape_py_drained(void *user, const char *path, enum ioshape_drained result,
					uint64_t bytes);
extern "Python" int ioshape_py_send(void *user, uint32_t to, uint32_t tag, const void *data,
				    size_t bytes, uint32_t timeout_ms);
extern "Python" int ioshape_py_receive(void *user, uint32_t from, uint32_t tag, void *into,
				       size_t bytes, uint32_t timeout_ms);

/* Destructors of C objects, which ffi.gc() calls: see FREED_BY_C in native.h. */
void ioshape_py_free_context(void *keep, struct ioshape_context **out);
void ioshape_py_free_save(void *keep, struct ioshape_save **out);
void ioshape_py_free_file(void *keep, struct ioshape_file **out);
void ioshape_py_free_directory(void *keep, struct save_directory **out);
void ioshape_py_free_items(void *keep, struct save_items **out);
void ioshape_py_free_slot(void *keep, struct ioshape_slot **out);
void ioshape_py_free_reader(void *keep, struct ioshape_reader **out);
void ioshape_py_free_group(void *keep, struct ioshape_group **out);
void ioshape_py_free_checkpoint(void *keep, struct ioshape_checkpoint **out);
void ioshape_py_free_tier(void *keep, struct ioshape_tier **out);

/* System calls that Python's os module lacks. */
int syncfs(int fd);
int renameat2(int fd, const char *path, int other_fd, const char *other, unsigned flags);

/* The table of settings: see native.h. */
const struct base_setting_row ioshape_py_settings[...];
