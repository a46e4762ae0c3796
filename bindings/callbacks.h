/* SPDX-License-Identifier: Apache-2.0 */
/* What C calls in Python, in the form that cffi reads. Threads of the library call some of them. */

extern "Python" int ioshape_py_progress(void *user, enum ioshape_phase phase, uint64_t done_bytes,
					uint64_t total_bytes);
/* The same, but only while staging: see native.h. */
int ioshape_py_progress_of_stage(void *user, enum ioshape_phase phase, uint64_t done_bytes,
				 uint64_t total_bytes);
/* Not 0 once *(int *)user is not: see native.h. */
int ioshape_py_progress_until(void *user, enum ioshape_phase phase, uint64_t done_bytes,
			      uint64_t total_bytes);
/* What an exit status of 0 becomes; 0 leaves it. See native.h. */
void ioshape_py_end_with(int status);
extern "Python" void ioshape_py_on_log(void *user, enum ioshape_log_level level,
				       const char *message);
/* The same, until Python ends: see native.h. */
void ioshape_py_log(void *user, enum ioshape_log_level level, const char *message);
void ioshape_py_end_log(void);
extern "Python" int ioshape_py_fetch(void *user, uint64_t offset, void *into, size_t bytes);
extern "Python" int ioshape_py_queue(void *user, const struct ioshape_place *place);
extern "Python" void ioshape_py_removing(void *user, uint64_t step, uint64_t bytes);
extern "Python" void ioshape_py_passed_over(void *user, uint64_t step);
extern "Python" void ioshape_py_drained(void *user, const char *path, enum ioshape_drained result,
					uint64_t bytes);
extern "Python" int ioshape_py_send(void *user, uint32_t to, uint32_t tag, const void *data,
				    size_t bytes, uint32_t timeout_ms);
extern "Python" int ioshape_py_receive(void *user, uint32_t from, uint32_t tag, void *into,
				       size_t bytes, uint32_t timeout_ms);

/* See native.h. */
void ioshape_py_free_context(void *keep, struct ioshape_context **out);
void ioshape_py_free_save(void *keep, struct ioshape_save **out);
void ioshape_py_free_file(void *keep, struct ioshape_file **out);
void ioshape_py_free_directory(void *keep, struct save_directory **out);
void ioshape_py_free_slot(void *keep, struct ioshape_slot **out);
void ioshape_py_free_reader(void *keep, struct ioshape_reader **out);
void ioshape_py_free_group(void *keep, struct ioshape_group **out);
void ioshape_py_free_generation(void *keep, struct ioshape_generation **out);
void ioshape_py_free_tier(void *keep, struct ioshape_tier **out);

/* The system's, which Python does not have. */
int syncfs(int fd);
int renameat2(int fd, const char *path, int other_fd, const char *other, unsigned flags);

/* See native.h. */
const struct base_setting_row ioshape_py_settings[...];
