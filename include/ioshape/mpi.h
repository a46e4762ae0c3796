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

/*
 * A way for bytes between the ranks of `parent`. Collective: all its ranks call it, between
 * MPI_Init_thread() and MPI_Finalize(). It works on a duplicate of `parent`: nothing of the
 * program's own can get in its way, or the other way round.
 *
 * The library's threads call MPI while the program does: that takes MPI_THREAD_MULTIPLE. With less
 * the answer is -ENOTSUP, on all ranks; a group without a comm uses the modes "each" and "node",
 * which need no MPI.
 *
 * A message travels through a buffer of the comm's own, so that giving one up after its time is
 * safe, whatever MPI still does with it. -EMSGSIZE above 1 GiB; -EINVAL for tags above what this
 * MPI has.
 */
int ioshape_comm_of_mpi(MPI_Comm parent, struct ioshape_comm **out, char *message,
			size_t message_bytes);

/* Collective; after the group that uses it, and before MPI_Finalize(). NULL is fine. */
void ioshape_comm_mpi_free(struct ioshape_comm *comm);

#define IOSHAPE_MPI_TOKEN_BYTES 33

/*
 * Sets rank, ranks, local_ranks and token of `options`, which may be zero but for its size. The
 * token is a new one, the same on all ranks; `token` keeps it, for as long as `options` is used.
 * Collective.
 */
int ioshape_group_options_of_mpi(MPI_Comm comm, struct ioshape_group_options *options,
				 char token[IOSHAPE_MPI_TOKEN_BYTES], char *message,
				 size_t message_bytes);

#ifdef __cplusplus
}
#endif

#endif
