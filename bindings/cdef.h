/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the Python package uses of the public headers, in the form that cffi reads. The C compiler
 * checks every line against the headers themselves; "..." stands for fields that Python leaves
 * alone.
 */

enum ioshape_engine {
	IOSHAPE_ENGINE_AUTO, IOSHAPE_ENGINE_URING, IOSHAPE_ENGINE_THREADS, IOSHAPE_ENGINE_BUFFERED,
	IOSHAPE_ENGINE_NIL, IOSHAPE_ENGINE_URING_ASYNC, ...
};
enum ioshape_direct { IOSHAPE_DIRECT_PREFER, IOSHAPE_DIRECT_REQUIRE, IOSHAPE_DIRECT_OFF, ... };
enum ioshape_staging_full { IOSHAPE_STAGING_WAIT, IOSHAPE_STAGING_REFUSE, ... };
enum ioshape_log_level {
	IOSHAPE_LOG_ERROR, IOSHAPE_LOG_WARNING, IOSHAPE_LOG_INFO, IOSHAPE_LOG_DEBUG, ...
};
enum ioshape_phase {
	IOSHAPE_PHASE_STAGE, IOSHAPE_PHASE_WAIT, IOSHAPE_PHASE_PLAN, IOSHAPE_PHASE_WRITE,
	IOSHAPE_PHASE_SYNC, IOSHAPE_PHASE_COMMIT, IOSHAPE_PHASE_READ, IOSHAPE_PHASE_DONE, ...
};
enum ioshape_calibrate {
	IOSHAPE_CALIBRATE_AUTO, IOSHAPE_CALIBRATE_OFF, IOSHAPE_CALIBRATE_AGAIN, ...
};
enum ioshape_full { IOSHAPE_FULL_FAIL, IOSHAPE_FULL_WAIT, IOSHAPE_FULL_SKIP, ... };
enum ioshape_away { IOSHAPE_AWAY_STAGGER, IOSHAPE_AWAY_WAIT, IOSHAPE_AWAY_FAIL, ... };

#define IOSHAPE_E_FORMAT ...
#define IOSHAPE_E_DAMAGED ...
#define IOSHAPE_E_LIMIT ...
#define IOSHAPE_E_SKIPPED ...
#define IOSHAPE_E_NO_TABLE ...
#define IOSHAPE_E_COORDINATOR ...

const char *ioshape_version(void);
const char *ioshape_strerror(int code);

typedef int (*ioshape_progress_fn)(void *user, enum ioshape_phase phase, uint64_t done_bytes,
				   uint64_t total_bytes);
typedef void (*ioshape_log_fn)(void *user, enum ioshape_log_level level, const char *message);
typedef int (*ioshape_fetch_fn)(void *user, uint64_t offset, void *into, size_t bytes);

/* ---- Contexts -------------------------------------------------------------------------------- */

struct ioshape_context;
struct ioshape_context_options {
	size_t size;
	enum ioshape_engine engine;
	enum ioshape_direct direct;
	uint64_t block_bytes;
	uint32_t queue_depth;
	uint32_t copy_threads;
	uint64_t staging_bytes;
	enum ioshape_staging_full staging_full;
	enum ioshape_log_level log_level;
	ioshape_log_fn log;
	void *log_user;
	const char *coordinator;
	const char *password_file;
	const char *pool;
	const char *job;
	uint32_t share;
	uint32_t slots;
	uint32_t lease_ms;
	uint32_t stall_ms;
	enum ioshape_away away;
	uint32_t stagger_most_ms;
	uint64_t rate;
	const char *layout;
	uint64_t target_bytes;
	enum ioshape_calibrate calibrate;
	enum ioshape_full full;
	uint32_t full_wait_ms;
	...;
};
int ioshape_context_open(struct ioshape_context **out,
			 const struct ioshape_context_options *options, char *message,
			 size_t message_bytes);
int ioshape_context_reserve(struct ioshape_context *context, uint64_t bytes);
int ioshape_context_trim(struct ioshape_context *context);
const char *ioshape_context_message(struct ioshape_context *context);
void ioshape_context_free(struct ioshape_context *context);

/* ---- What a path sits on --------------------------------------------------------------------- */

enum ioshape_answer { IOSHAPE_UNKNOWN, IOSHAPE_NO, IOSHAPE_YES, ... };
#define IOSHAPE_ALL_TARGETS ...
struct ioshape_storage_target {
	const char *name;
	uint64_t total_bytes;
	uint64_t free_bytes;
};
struct ioshape_storage {
	size_t size;
	const char *directory;
	const char *family;
	const char *flavour;
	const char *type;
	const char *source;
	const char *mount_point;
	const char *options;
	uint64_t total_bytes;
	uint64_t free_bytes;
	uint64_t write_unit;
	uint64_t flight_bytes;
	uint32_t memory_alignment;
	uint32_t offset_alignment;
	enum ioshape_answer direct;
	enum ioshape_answer rotational;
	uint32_t remote;
	uint32_t serial_direct;
	uint32_t targets;
	uint32_t target_listed;
	const struct ioshape_storage_target *target;
	const char *stripes;
	uint64_t stripe_bytes;
	uint32_t stripe_count;
	uint32_t mirrors;
	const char *target_pool;
	const char *file_stripes;
	uint32_t file_stripe_count;
	uint32_t is_file;
	uint32_t asked_stripe_count;
	uint64_t for_bytes;
	const char *engine;
	const char *choice;
	uint64_t block_bytes;
	uint32_t queue_depth;
	int32_t uring_code;
	uint64_t target_bytes;
	const char *engine_note;
	const char *stripes_asked;
	const char *stripes_why;
	const char *pool;
	const char *writers_why;
	uint32_t writers;
	uint32_t calibrated;
	double calibrated_s;
	double calibrated_rate;
	...;
};
struct ioshape_probe_options {
	size_t size;
	uint64_t bytes;
	uint32_t files;
	uint32_t calibrate;
	...;
};
int ioshape_probe(struct ioshape_context *context, const char *path,
		  const struct ioshape_probe_options *options, struct ioshape_storage **out);
void ioshape_storage_free(struct ioshape_storage *storage);

/* ---- Slots ----------------------------------------------------------------------------------- */

struct ioshape_place {
	size_t size;
	uint32_t position;
	uint32_t capacity;
	double waited_s;
	char ahead[...];
	char pool[...];
	char coordinator[...];
	...;
};
typedef int (*ioshape_queue_fn)(void *user, const struct ioshape_place *place);
struct ioshape_slot;
struct ioshape_slot_options {
	size_t size;
	const char *pool;
	const char *path;
	uint32_t weight;
	uint64_t bytes;
	int64_t timeout_ms;
	ioshape_queue_fn waiting;
	void *waiting_user;
	...;
};
struct ioshape_slot_info {
	size_t size;
	uint64_t fence;
	double waited_s;
	double paced_s;
	uint32_t position;
	uint32_t capacity;
	uint32_t lost;
	uint32_t express;
	char ahead[...];
	char pool[...];
	char coordinator[...];
	char note[...];
	...;
};
int ioshape_slot_acquire(struct ioshape_context *context,
			 const struct ioshape_slot_options *options, struct ioshape_slot **out);
int ioshape_slot_pass(struct ioshape_slot *slot, uint64_t bytes);
int ioshape_slot_get_info(struct ioshape_slot *slot, struct ioshape_slot_info *info);
void ioshape_slot_release(struct ioshape_slot *slot);

int ioshape_pool_name(struct ioshape_context *context, const char *path, char *name, size_t bytes);
struct ioshape_member {
	const char *id;
	const char *job;
	const char *node;
	uint32_t rank;
	uint32_t weight;
	uint32_t express;
	uint64_t bytes;
	uint64_t passed;
	uint64_t fence;
	double since_s;
	double lease_s;
	...;
};
struct ioshape_pool_status {
	size_t size;
	const char *pool;
	const char *coordinator;
	uint32_t capacity;
	const char *capacity_by;
	uint32_t used;
	uint64_t pool_rate;
	uint64_t job_rate;
	uint64_t small_bytes;
	uint32_t express;
	uint64_t grants;
	uint32_t grants_last_minute;
	const struct ioshape_member *holders;
	size_t holder_listed;
	size_t holder_count;
	const struct ioshape_member *waiters;
	size_t waiter_listed;
	size_t waiter_count;
	...;
};
struct ioshape_pool_settings {
	size_t size;
	uint32_t capacity;
	uint64_t pool_rate;
	uint64_t job_rate;
	uint64_t small_bytes;
	uint32_t express;
	uint32_t clear;
	...;
};
int ioshape_pool_get_status(struct ioshape_context *context, const char *pool,
			struct ioshape_pool_status **out);
void ioshape_pool_status_free(struct ioshape_pool_status *status);
int ioshape_pool_set(struct ioshape_context *context, const char *pool,
		     const struct ioshape_pool_settings *settings);
int ioshape_pool_kick(struct ioshape_context *context, const char *pool, const char *id);
int ioshape_pool_names(struct ioshape_context *context, char **names);
void ioshape_pool_names_free(char *names);

/* ---- Saving ---------------------------------------------------------------------------------- */

struct ioshape_report {
	size_t size;
	uint64_t file_bytes;
	uint64_t tensor_bytes;
	double stage_s;
	double plan_s;
	double write_s;
	double sync_s;
	double commit_s;
	double total_s;
	char engine[...];
	char layout[...];
	uint32_t direct;
	uint32_t queue_depth;
	uint64_t block_bytes;
	uint32_t memory_alignment;
	uint32_t offset_alignment;
	char filesystem[...];
	uint32_t fallbacks;
	uint32_t short_results;
	char fallback_text[...];
	double slot_s;
	double paced_s;
	uint64_t fence;
	uint32_t position;
	uint32_t slot_lost;
	uint32_t express;
	uint32_t capacity;
	char coordinator[...];
	char pool[...];
	char ahead[...];
	double group_s;
	uint64_t generation_bytes;
	uint32_t ranks;
	char why[...];
	double started_s;
	uint64_t stripe_bytes;
	uint32_t stripe_count;
	uint32_t skipped;
	char stripes[...];
	char stripes_asked[...];
	char choice[...];
	...;
};
struct ioshape_save_options {
	size_t size;
	ioshape_progress_fn progress;
	void *progress_user;
	uint32_t no_replace;
	uint32_t no_sync;
	uint32_t borrow;
	ioshape_queue_fn queue;
	void *queue_user;
	...;
};
struct ioshape_record {
	const char *name;
	const void *data;
	uint64_t bytes;
	uint32_t alignment;
	ioshape_fetch_fn fetch;
	void *fetch_user;
	...;
};
struct ioshape_save;
int ioshape_save_records_async(struct ioshape_context *context, const char *path,
			       const struct ioshape_record *records, size_t count,
			       const struct ioshape_save_options *options,
			       struct ioshape_save **out);
int ioshape_save_poll(struct ioshape_save *save);
int ioshape_save_wait(struct ioshape_save *save, int64_t timeout_ms);
int ioshape_save_report(struct ioshape_save *save, struct ioshape_report *report);
int ioshape_save_progress(struct ioshape_save *save, enum ioshape_phase *phase,
			  uint64_t *done_bytes, uint64_t *total_bytes);
int ioshape_save_place(struct ioshape_save *save, struct ioshape_place *place);
int ioshape_save_cancel(struct ioshape_save *save);
const char *ioshape_save_message(struct ioshape_save *save);
void ioshape_save_free(struct ioshape_save *save);

struct ioshape_file;
struct ioshape_file_options {
	size_t size;
	uint64_t expected_bytes;
	ioshape_progress_fn progress;
	void *progress_user;
	uint32_t no_replace;
	uint32_t no_sync;
	...;
};
int ioshape_file_open(struct ioshape_context *context, const char *path,
		      const struct ioshape_file_options *options, struct ioshape_file **out);
int ioshape_file_write(struct ioshape_file *file, const void *data, size_t bytes);
int ioshape_file_commit(struct ioshape_file *file, struct ioshape_report *report);
const char *ioshape_file_message(struct ioshape_file *file);
void ioshape_file_free(struct ioshape_file *file);

/* ---- Reading --------------------------------------------------------------------------------- */

struct ioshape_reader;
struct ioshape_reader_options {
	size_t size;
	uint32_t no_verify;
	uint32_t fresh_memory;
	ioshape_progress_fn progress;
	void *progress_user;
	uint64_t file_offset;
	uint64_t file_bytes;
	...;
};
struct ioshape_record_info {
	size_t size;
	const char *name;
	uint64_t bytes;
	uint64_t file_offset;
	uint32_t crc32;
	...;
};
int ioshape_reader_open(struct ioshape_context *context, const char *path,
			const struct ioshape_reader_options *options, struct ioshape_reader **out);
uint64_t ioshape_reader_records(struct ioshape_reader *reader);
int ioshape_reader_record(struct ioshape_reader *reader, uint64_t index,
			  struct ioshape_record_info *info);
int ioshape_reader_find_record(struct ioshape_reader *reader, const char *name, uint64_t *index);
int ioshape_reader_read(struct ioshape_reader *reader, uint64_t record, uint64_t offset, void *into,
			size_t bytes);
uint64_t ioshape_reader_file_bytes(struct ioshape_reader *reader);
int ioshape_reader_read_file(struct ioshape_reader *reader, uint64_t offset, void *into,
			     size_t bytes);
int ioshape_reader_verify(struct ioshape_reader *reader);
const char *ioshape_reader_message(struct ioshape_reader *reader);
void ioshape_reader_free(struct ioshape_reader *reader);

/* ---- Groups ---------------------------------------------------------------------------------- */

struct ioshape_comm {
	size_t size;
	void *user;
	int (*send)(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		    uint32_t timeout_ms);
	int (*receive)(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
		       uint32_t timeout_ms);
	void (*progress)(void *user);
	...;
};
enum ioshape_mode {
	IOSHAPE_MODE_AUTO, IOSHAPE_MODE_EACH, IOSHAPE_MODE_NODE, IOSHAPE_MODE_RANK0, ...
};
enum ioshape_board {
	IOSHAPE_BOARD_AUTO, IOSHAPE_BOARD_REDIS, IOSHAPE_BOARD_SOCKETS, IOSHAPE_BOARD_FILES, ...
};
struct ioshape_group;
struct ioshape_group_options {
	size_t size;
	uint32_t rank;
	uint32_t ranks;
	uint32_t local_ranks;
	enum ioshape_mode mode;
	enum ioshape_board board;
	const char *token;
	const char *node;
	const struct ioshape_comm *comm;
	uint32_t deadline_ms;
	uint32_t keep_last;
	uint64_t keep_every;
	...;
};
int ioshape_group_open(struct ioshape_context *context, const char *directory,
		       const struct ioshape_group_options *options, struct ioshape_group **out);
int ioshape_group_save_records_async(struct ioshape_group *group, uint64_t step,
				     const struct ioshape_record *records, size_t count,
				     const struct ioshape_save_options *options,
				     struct ioshape_save **out);
int ioshape_group_fail(struct ioshape_group *group, uint64_t step, const char *why);
int ioshape_group_latest(struct ioshape_group *group, uint64_t *step);
void ioshape_group_free(struct ioshape_group *group);

/* ---- Generations ----------------------------------------------------------------------------- */

struct ioshape_generation;
struct ioshape_generation_info {
	size_t size;
	uint64_t step;
	uint32_t ranks;
	uint32_t files;
	uint64_t bytes;
	int64_t saved;
	enum ioshape_mode mode;
	const char *path;
	...;
};
struct ioshape_part_info {
	size_t size;
	const char *file;
	const char *name;
	uint64_t offset;
	uint64_t bytes;
	uint32_t crc32;
	...;
};
struct ioshape_prune_options {
	size_t size;
	uint32_t keep_last;
	uint32_t dry_run;
	uint64_t keep_every;
	void (*removing)(void *user, uint64_t step, uint64_t bytes);
	void *removing_user;
	...;
};
int ioshape_generation_open(struct ioshape_context *context, const char *directory, uint64_t step,
			    struct ioshape_generation **out);
int ioshape_generation_open_latest(struct ioshape_context *context, const char *directory,
				   struct ioshape_generation **out);
int ioshape_generation_get_info(struct ioshape_generation *generation,
				struct ioshape_generation_info *info);
int ioshape_generation_part(struct ioshape_generation *generation, uint32_t rank,
			    struct ioshape_part_info *info);
int ioshape_generation_reader(struct ioshape_generation *generation, uint32_t rank,
			      const struct ioshape_reader_options *options,
			      struct ioshape_reader **out);
int ioshape_generation_verify(struct ioshape_generation *generation, ioshape_progress_fn progress,
			      void *progress_user);
void ioshape_generation_free(struct ioshape_generation *generation);
int ioshape_generation_steps(struct ioshape_context *context, const char *directory,
			     uint64_t **steps, size_t *count);
void ioshape_steps_free(uint64_t *steps);
int ioshape_generations_prune(struct ioshape_context *context, const char *directory,
			      const struct ioshape_prune_options *options, uint64_t *removed);

/* ---- Called from C --------------------------------------------------------------------------- */

extern "Python" int ioshape_py_progress(void *user, enum ioshape_phase phase, uint64_t done_bytes,
					uint64_t total_bytes);
/* The same, but only while staging: see native.h. */
int ioshape_py_progress_of_stage(void *user, enum ioshape_phase phase, uint64_t done_bytes,
				 uint64_t total_bytes);
extern "Python" void ioshape_py_log(void *user, enum ioshape_log_level level, const char *message);
extern "Python" int ioshape_py_fetch(void *user, uint64_t offset, void *into, size_t bytes);
extern "Python" int ioshape_py_queue(void *user, const struct ioshape_place *place);
extern "Python" void ioshape_py_removing(void *user, uint64_t step, uint64_t bytes);
extern "Python" int ioshape_py_send(void *user, uint32_t to, uint32_t tag, const void *data,
				    size_t bytes, uint32_t timeout_ms);
extern "Python" int ioshape_py_receive(void *user, uint32_t from, uint32_t tag, void *into,
				       size_t bytes, uint32_t timeout_ms);
