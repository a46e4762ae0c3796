/* SPDX-License-Identifier: Apache-2.0 */
/* Lines of mount tables: type, source and options of a mount. */
/* Included, because it tests static functions. */
#include "fs/storage.c"
#include "support/check_main.h"

/* One line for each family, as real hosts show them. */
static const struct {
	const char *line;
	const char *type, *source, *mount_point;
	enum fs_family family;
	uint64_t magic;
} lines[] = {
	{ "701 29 0:61 / /scratch rw,relatime shared:372 - lustre 10.1.0.4@o2ib:10.1.0.5@o2ib:/scr "
	  "rw,checksum,flock,user_xattr,lruresize,lazystatfs,nouser_fid2path,verbose,encrypt",
	  "lustre", "10.1.0.4@o2ib:10.1.0.5@o2ib:/scr", "/scratch", FS_LUSTRE, 0x0bd00bd0 },
	{ "702 29 0:62 / /mnt/beegfs rw,relatime shared:380 - beegfs beegfs_nodev "
	  "rw,cfgFile=/etc/beegfs/beegfs-client.conf",
	  "beegfs", "beegfs_nodev", "/mnt/beegfs", FS_BEEGFS, 0x19830326 },
	{ "703 29 0:63 / /gpfs/fs1 rw,relatime shared:390 - gpfs fs1 rw", "gpfs", "fs1",
	  "/gpfs/fs1", FS_GPFS, 0x47504653 },
	{ "704 29 0:64 / /mnt/cephfs rw,relatime shared:395 - ceph "
	  "10.0.0.1:6789,10.0.0.2:6789:/volumes/a rw,name=admin,secret=<hidden>,acl",
	  "ceph", "10.0.0.1:6789,10.0.0.2:6789:/volumes/a", "/mnt/cephfs", FS_CEPH, 0x00c36400 },
	{ "705 29 0:65 / /mnt/cf rw,nosuid,nodev,relatime shared:396 - fuse.ceph-fuse ceph-fuse "
	  "rw,user_id=0,group_id=0,allow_other",
	  "fuse.ceph-fuse", "ceph-fuse", "/mnt/cf", FS_CEPH, FS_FUSE_MAGIC },
	{ "706 29 0:66 / /home rw,relatime shared:397 - nfs4 filer:/export/home "
	  "rw,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,nconnect=8,timeo=600",
	  "nfs4", "filer:/export/home", "/home", FS_NFS, 0x6969 },
	{ "707 29 0:67 / /data rw,noatime shared:398 - nfs [fd00::1]:/data "
	  "rw,vers=3,rsize=1048576,wsize=524288,proto=rdma,port=20049,mountproto=tcp",
	  "nfs", "[fd00::1]:/data", "/data", FS_NFS, 0x6969 },
	{ "708 29 0:68 / /mnt/weka rw,relatime shared:399 - wekafs new_fs "
	  "rw,writecache,inode_bits=64,dentry_max_age_positive=1000",
	  "wekafs", "new_fs", "/mnt/weka", FS_WEKA, 0x19640822 },
	{ "709 29 0:69 / /tmp/daos rw,nosuid,nodev,noatime - fuse.daos dfuse "
	  "rw,user_id=4211,group_id=100,default_permissions",
	  "fuse.daos", "dfuse", "/tmp/daos", FS_DAOS, FS_FUSE_MAGIC },
	{ "710 29 0:70 / /jfs rw,relatime shared:401 - fuse.juicefs JuiceFS:myjfs "
	  "rw,user_id=0,group_id=0,default_permissions,allow_other",
	  "fuse.juicefs", "JuiceFS:myjfs", "/jfs", FS_JUICEFS, FS_FUSE_MAGIC },
	{ "711 29 0:71 / /mnt/alluxio rw,nosuid,nodev,relatime - fuse.alluxio-fuse alluxio-fuse "
	  "rw,user_id=1000,group_id=1000",
	  "fuse.alluxio-fuse", "alluxio-fuse", "/mnt/alluxio", FS_ALLUXIO, FS_FUSE_MAGIC },
	{ "712 29 0:72 / /mnt/gluster rw,relatime shared:402 - fuse.glusterfs gl01:/vol0 "
	  "rw,user_id=0,group_id=0,default_permissions,allow_other,max_read=131072",
	  "fuse.glusterfs", "gl01:/vol0", "/mnt/gluster", FS_GLUSTER, FS_FUSE_MAGIC },
	{ "713 29 0:73 / /mnt/pool rw,relatime shared:403 - fuse.mergerfs a:b:c rw,allow_other",
	  "fuse.mergerfs", "a:b:c", "/mnt/pool", FS_FUSE, FS_FUSE_MAGIC },
	{ "714 29 8:17 /sub /local rw,noatime shared:5 - xfs /dev/sdb1 "
	  "rw,attr2,inode64,logbufs=8,noquota",
	  "xfs", "/dev/sdb1", "/local", FS_XFS, 0x58465342 },
	{ "715 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw,discard", "ext4", "/dev/root",
	  "/", FS_EXT, 0xef53 },
	{ "716 29 0:74 /@home /b rw,relatime shared:9 - btrfs /dev/nvme0n1p2 "
	  "rw,ssd,space_cache=v2,subvolid=257,subvol=/@home",
	  "btrfs", "/dev/nvme0n1p2", "/b", FS_BTRFS, 0x9123683e },
	{ "717 29 0:75 / /tank/a rw,relatime shared:10 - zfs tank/a rw,xattr,posixacl", "zfs",
	  "tank/a", "/tank/a", FS_ZFS, 0x2fc12fc1 },
	{ "718 29 0:76 / /dev/shm rw,nosuid,nodev shared:3 - tmpfs tmpfs rw,size=1g", "tmpfs",
	  "tmpfs", "/dev/shm", FS_TMPFS, 0x01021994 },
	{ "719 29 0:77 / / rw,relatime - overlay overlay "
	  "rw,lowerdir=/var/lib/l/A:/var/lib/l/B,upperdir=/var/lib/u,workdir=/var/lib/w",
	  "overlay", "overlay", "/", FS_OVERLAY, 0x794c7630 },
	{ "720 29 0:78 / /proc rw,nosuid shared:14 - proc proc rw", "proc", "proc", "/proc",
	  FS_OTHER, 0x9fa0 },
};

static struct test_case cases = { .name = "mount table" };

LOOP_TEST(cases, a_line_of_each_family_is_read, 0, ARRAY_LENGTH(lines))
{
	struct fs_mount mount;
	char text[2048];
	unsigned number, major_number, minor_number;

	ck_assert_int_eq(
		sscanf(lines[_i].line, "%u %*u %u:%u", &number, &major_number, &minor_number), 3);
	snprintf(text, sizeof(text), "1 0 7:7 / /x rw - squashfs /dev/l rw\n%s\n%s", lines[_i].line,
		 "2 0 7:8 / /y rw - squashfs /dev/m rw\n");
	for (int by_device = 0; by_device < 2; by_device++) {
		memset(&mount, 0xa5, sizeof(mount));
		ck_assert_int_eq(
			find_line(text, by_device ? 0 : number, major_number, minor_number, &mount),
			0);
		ck_assert_str_eq(mount.type, lines[_i].type);
		ck_assert_str_eq(mount.source, lines[_i].source);
		ck_assert_str_eq(mount.mount_point, lines[_i].mount_point);
		ck_assert_int_eq(strncmp(mount.options, "rw,", 3), 0);
		/* Options of the mount and of the filesystem. */
		ck_assert_ptr_nonnull(strstr(mount.options + 1, ",rw"));
	}
	ck_assert_int_eq(fs_family_of(lines[_i].type, lines[_i].magic), lines[_i].family);
	ck_assert_int_eq(fs_family_of(lines[_i].type, 0), lines[_i].family);
}

TEST(cases, families_have_names_of_their_own)
{
	for (int i = 0; i < FS_FAMILIES; i++) {
		ck_assert_ptr_nonnull(fs_family_name((enum fs_family)i));
		for (int k = 0; k < i; k++)
			ck_assert_str_ne(fs_family_name((enum fs_family)i),
					 fs_family_name((enum fs_family)k));
	}
	ck_assert_str_eq(fs_family_name((enum fs_family)FS_FAMILIES), "other");
	ck_assert_str_eq(fs_family_name((enum fs_family) - 1), "other");
}

TEST(cases, without_a_mount_table_the_magic_number_tells)
{
	for (size_t i = 0; i < ARRAY_LENGTH(lines); i++) {
		enum fs_family family = lines[i].family;
		char type[32];

		/* Families with a magic number of their own. */
		if (lines[i].magic == FS_FUSE_MAGIC || family == FS_WEKA)
			continue;
		fs_magic_name(lines[i].magic, type, sizeof(type));
		ck_assert_int_eq(fs_family_of(type, lines[i].magic), family);
		ck_assert_int_eq(fs_family_of("", lines[i].magic), family);
	}
	ck_assert_int_eq(fs_family_of("fuse.anything", FS_FUSE_MAGIC), FS_FUSE);
	ck_assert_int_eq(fs_family_of("fuse.anything", 0), FS_FUSE);
	ck_assert_int_eq(fs_family_of("fuseblk", FS_FUSE_MAGIC), FS_FUSE);
	ck_assert_int_eq(fs_family_of("squashfs", 0x73717368), FS_OTHER);
}

TEST(cases, escaped_characters_are_those_they_stand_for)
{
	static const char text[] =
		"5 1 0:9 / /mnt/with\\040a\\040space\\040-\\040and\\134dash rw,x=\\011y shared:1 "
		"master:2 - fuse.sshfs user@host:/x\\040y\\0 rw,user_id=0\n";
	struct fs_mount mount;

	ck_assert_int_eq(find_line(text, 5, 0, 0, &mount), 0);
	ck_assert_str_eq(mount.mount_point, "/mnt/with a space - and\\dash");
	ck_assert_str_eq(mount.options, "rw,x=\ty,rw,user_id=0");
	/* Not a valid escape, so it is unchanged. */
	ck_assert_str_eq(mount.source, "user@host:/x y\\0");
}

TEST(cases, the_mount_on_top_is_the_one_of_a_device)
{
	static const char text[] = "5 1 0:9 / /a rw - tmpfs one rw\n"
				   "6 1 0:9 / /b rw - tmpfs two rw\n"
				   "7 1 0:8 / /c rw - tmpfs three rw\n";
	struct fs_mount mount;

	ck_assert_int_eq(find_line(text, 0, 0, 9, &mount), 0);
	ck_assert_str_eq(mount.source, "two");
	ck_assert_int_eq(find_line(text, 5, 0, 8, &mount), 0);
	ck_assert_str_eq(mount.source, "one");
	ck_assert_int_eq(find_line(text, 8, 0, 9, &mount), -ENOENT);
	ck_assert_int_eq(find_line(text, 0, 1, 9, &mount), -ENOENT);
	ck_assert_int_eq(find_line("", 0, 0, 9, &mount), -ENOENT);
}

TEST(cases, lines_cut_anywhere_and_long_ones_are_survived)
{
	struct fs_mount mount;
	char text[4096], *copy;
	int length;

	for (size_t i = 0; i < ARRAY_LENGTH(lines); i++) {
		for (size_t bytes = 0; bytes <= strlen(lines[i].line); bytes++) {
			copy = strndup(lines[i].line, bytes);
			find_line(copy, 701 + i, 0, 0, &mount);
			free(copy);
		}
	}
	/* Fields that are too long are cut, and later ones are still found. */
	length = snprintf(text, sizeof(text), "1 2 3:4 / /%0600d rw,%0700d - ext4 %0600d ro", 1, 2,
			  3);
	ck_assert_int_lt(length, (int)sizeof(text));
	ck_assert_int_eq(find_line(text, 1, 0, 0, &mount), 0);
	ck_assert_str_eq(mount.type, "ext4");
	ck_assert_uint_eq(strlen(mount.mount_point), sizeof(mount.mount_point) - 1);
	ck_assert_uint_eq(strlen(mount.options), sizeof(mount.options) - 1);
	ck_assert_uint_eq(strlen(mount.source), sizeof(mount.source) - 1);
}

/* ---- Names of Lustre filesystems ------------------------------------------------------------- */

TEST(cases, the_name_of_a_lustre_is_found_in_its_source)
{
	static const struct {
		const char *source, *name;
	} sources[] = {
		{ "10.0.0.1@tcp:/fs1", "fs1" },
		{ "10.0.0.1@tcp:10.0.0.2@tcp:/fs1/home/a", "fs1" },
		{ "10.0.0.1,192.168.0.1@o2ib1:10.0.0.2@tcp:/scratch/", "scratch" },
		{ "fe80::1@tcp:/fs1", "fs1" },
		{ "mgs:/", "" },
		{ "10.0.0.1@tcp:10.0.0.2@tcp", "" },
		{ "fs1", "" },
		{ "", "" },
	};
	const char *name = "";

	for (size_t i = 0; i < ARRAY_LENGTH(sources); i++) {
		size_t bytes = fs_lustre_name(sources[i].source, &name);

		ck_assert_uint_eq(bytes, strlen(sources[i].name));
		ck_assert_int_eq(strncmp(name, sources[i].name, bytes), 0);
	}
}
