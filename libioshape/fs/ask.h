/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the fs floor: asking one filesystem or another for a layout. */
#ifndef FS_ASK_H
#define FS_ASK_H

#include "fs/fs.h"

/* What came of it. */
struct fs_answer {
	struct fs_layout got; /* read back; its count is 0 if nothing was told */
	bool plain;           /* the file can be used in any case: it was created plainly */
	char why[96];         /* what was refused, a clause; "" if nothing was */
};

/* Keeps what failed, and errno's words for it; the first time counts. */
void fs_refused(struct fs_answer *answer, const char *what);

/* What Lustre is told, in the order of bytes of this host. Pure. Returns how many bytes it is. */
#define FS_LUSTRE_ASK_BYTES 2048
size_t fs_lustre_ask(const struct fs_layout *ask, uint8_t blob[FS_LUSTRE_ASK_BYTES]);

/*
 * What CephFS is told: "stripe_unit=... stripe_count=...", from what the file has now. Pure.
 * -EINVAL if that is not understood.
 */
int fs_ceph_ask(const struct fs_layout *ask, const char *now, size_t now_bytes, char *text,
		size_t text_bytes);

/* What of `got` is not as asked for: 0 nothing; 1 only that there are fewer stripes; 2 anything
 * else. `text` receives a clause. Pure. */
int fs_differs(const struct fs_layout *ask, const struct fs_layout *got, char *text,
	       size_t text_bytes);

#endif
