/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the fs floor: what storage.c puts together. */
#ifndef FS_STORAGE_H
#define FS_STORAGE_H

#include "fs/fs.h"

/* ---- NFS (nfs_options.c) --------------------------------------------------------------------- */

/* 0 and "" for what the options do not say. */
struct fs_nfs_options {
	uint32_t version, minor; /* minor of version 4 */
	char proto[16];          /* "tcp", "tcp6", "rdma" */
	uint64_t write_bytes;
	uint32_t connections;
};

/* From a mount's options with commas between them. Pure. */
void fs_nfs_options(const char *options, size_t bytes, struct fs_nfs_options *nfs);

/* "NFSv4.2 over RDMA", "NFSv3 over TCP, 8 connections". Pure. */
void fs_nfs_text(const struct fs_nfs_options *nfs, char *text, size_t text_bytes);

/* ---- Lustre's client (lustre_sys.c) ---------------------------------------------------------- */

/*
 * What /sys/fs/lustre, or /proc/fs/lustre of older ones, says about the filesystem `name` of
 * `name_bytes`: its targets and their space, how large and how many its requests may be, and the
 * layout of directories that have none. What cannot be read is left alone.
 */
void fs_look_at_lustre(const char *root, const char *name, size_t name_bytes,
		       struct fs_storage *storage);

/* ---- BeeGFS' client (beegfs_sys.c) ----------------------------------------------------------- */

/* How many targets the mount has whose options these are; 0 if /proc/fs/beegfs does not tell. */
uint32_t fs_count_beegfs_targets(const char *root, const char *options);

/* "mgmt01:8008", its management server, in the place of the mount table's "beegfs_nodev", which is
 * the same for all. Left alone if /proc/fs/beegfs does not tell. */
void fs_name_beegfs(const char *root, const char *options, char *source, size_t source_bytes);

/* ---- CephFS (pool.c) ------------------------------------------------------------------------- */

/*
 * "CLUSTER-ID.FILESYSTEM", or the cluster's id alone if the mount does not tell the filesystem's
 * name. `cluster_id` is what the mount answered, or "". False if the id is not known. Pure.
 */
bool fs_ceph_name(const struct fs_mount *mount, const char *cluster_id, char *name,
		  size_t name_bytes);

#endif
