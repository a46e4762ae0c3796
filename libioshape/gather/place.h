/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A folder in this host's memory in which ranks of one user meet: for their notes, and for the
 * sockets of their streams. Mode 0700: nobody else can put or take anything there. Private to this
 * floor.
 */
#ifndef GATHER_PLACE_H
#define GATHER_PLACE_H

#include "gather/gather.h"

#define PLACE_PATH_BYTES 256

/* Makes the folder if it is not there. `given`: NULL, or the folder that takes the place of
 * /dev/shm. */
int place_find(char path[PLACE_PATH_BYTES], const char *given, struct base_error *error);
/* The same for two processes only if they see the same folder. */
void place_identify(char id[GATHER_PLACE_BYTES], const char *path);

#endif
