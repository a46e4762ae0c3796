/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of programs that use MPI. In a library of its own, ioshape-mpi (pkg-config: ioshape-mpi),
 * built with meson -Dmpi=enabled. <ioshape/ioshape.h> does not include this header.
 *
 * The sentence that goes with a failure is written to `message` (may be NULL), cut to
 * message_bytes.
 */
#ifndef IOSHAPE_MPI_H
#define IOSHAPE_MPI_H

#include <ioshape/group.h>

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Makes a way for bytes between the ranks of a communicator.
 *
 * All its ranks call this, between MPI_Init_thread() and MPI_Finalize(). It works on a duplicate of
 * `parent`, so nothing of the program's own can get in its way, or the other way round.
 *
 * The library's threads call MPI while the program does, which takes MPI_THREAD_MULTIPLE. A group
 * without a comm uses the modes "each" and "node", which need no MPI.
 *
 * A message travels through a buffer of the comm's own, so that giving one up after its time is
 * safe, whatever MPI still does with it. Its functions answer -EMSGSIZE above 1 GiB, and -EINVAL
 * for tags above what this MPI has.
 *
 * @param parent         the communicator
 * @param out            receives the comm, to be freed with ioshape_comm_mpi_free(), or NULL
 * @param message        receives a sentence if the call fails; may be NULL
 * @param message_bytes  size of `message`
 * @return 0; -ENOTSUP, on all ranks, without MPI_THREAD_MULTIPLE; another negative code
 */
int ioshape_comm_of_mpi(MPI_Comm parent, struct ioshape_comm **out, char *message,
			size_t message_bytes);

/**
 * Frees a comm. All ranks call this, after the group that uses it and before MPI_Finalize().
 *
 * @param comm  the comm; NULL is fine
 */
void ioshape_comm_mpi_free(struct ioshape_comm *comm);

#define IOSHAPE_MPI_TOKEN_BYTES 33

/**
 * Sets rank, ranks, local_ranks and token of a group's options. All ranks call this.
 *
 * @param comm           the communicator
 * @param options        may be zero but for its size
 * @param token          receives a new token, the same on all ranks; kept as long as `options` is
 *                       used
 * @param message        receives a sentence if the call fails; may be NULL
 * @param message_bytes  size of `message`
 * @return 0 or a negative code
 */
int ioshape_group_options_of_mpi(MPI_Comm comm, struct ioshape_group_options *options,
				 char token[IOSHAPE_MPI_TOKEN_BYTES], char *message,
				 size_t message_bytes);

#ifdef __cplusplus
}
#endif

#endif
