/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of programs that use MPI. The functions are in a library of their own, ioshape-mpi
 * (pkg-config: ioshape-mpi), which is built with meson -Dmpi=enabled. <ioshape/ioshape.h> does not
 * include this header.
 *
 * If a function fails, it writes a sentence that explains the failure to `message`, truncated to
 * message_bytes. `message` may be NULL.
 */
#ifndef IOSHAPE_MPI_H
#define IOSHAPE_MPI_H

#include <ioshape/group.h>

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Creates a transport between the ranks of a communicator.
 *
 * All ranks of the communicator call this function, between MPI_Init_thread() and MPI_Finalize().
 * The transport works on a duplicate of `parent`, so that messages of the program and of the
 * library never mix.
 *
 * The library's threads call MPI while the program does, which requires MPI_THREAD_MULTIPLE. A
 * group without a comm uses the modes "each" and "node", which need no MPI.
 *
 * Each message passes through a buffer of the transport. It can therefore give up a message after
 * its timeout, even if MPI still uses the buffer. Its functions return -EMSGSIZE for messages above
 * 1 GiB, and -EINVAL for tags above the limit of this MPI.
 *
 * @param parent         communicator. All of its ranks must call
 * @param out            receives the transport, to be freed with ioshape_comm_mpi_free(). NULL if
 *                       the call fails
 * @param message        receives a sentence if the call fails. NULL if not needed
 * @param message_bytes  size of `message`
 * @return 0; -ENOTSUP, on all ranks, without MPI_THREAD_MULTIPLE; -EINVAL outside of
 *         MPI_Init_thread() and MPI_Finalize(), or if `out` is NULL; -EIO if MPI fails; -ENOMEM
 */
int ioshape_comm_of_mpi(MPI_Comm parent, struct ioshape_comm **out, char *message,
			size_t message_bytes);

/**
 * Frees a transport. All ranks call this function, after they have freed the group that uses the
 * transport and before MPI_Finalize().
 *
 * @param comm  the transport; NULL is allowed
 */
void ioshape_comm_mpi_free(struct ioshape_comm *comm);

/** Size in bytes of a token of ioshape_group_options_of_mpi(), with the final zero byte. */
#define IOSHAPE_MPI_TOKEN_BYTES 33

/**
 * Sets rank, ranks, local_ranks and token of a group's options from a communicator. All ranks call
 * this function, between MPI_Init_thread() and MPI_Finalize().
 *
 * @param comm           the communicator
 * @param options        changed. Only its size must be set before the call
 * @param token          receives a random token, the same on all ranks. Its memory must stay valid
 *                       until the group is open
 * @param message        receives a sentence if the call fails. NULL if not needed
 * @param message_bytes  size of `message`
 * @return 0; -EINVAL outside of MPI_Init_thread() and MPI_Finalize(), or if an argument is NULL;
 *         -EIO if MPI or the source of random numbers fails
 */
int ioshape_group_options_of_mpi(MPI_Comm comm, struct ioshape_group_options *options,
				 char token[IOSHAPE_MPI_TOKEN_BYTES], char *message,
				 size_t message_bytes);

#ifdef __cplusplus
}
#endif

#endif
