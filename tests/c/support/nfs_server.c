/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/nfs_server.h"

#include "support/machine.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define SERVER "/usr/bin/ganesha.nfsd"
#define PORTMAPPER "/usr/sbin/rpcbind"
#define MOUNT_PORT 2050
#define PORT 2049
#define START_MS 10000

/*
 * Configuration of the server: no grace period for clients of an earlier run, and only the services
 * that the tests use.
 */
static const char configuration[] =
	"NFS_CORE_PARAM { Protocols = 3, 4; NFS_Port = 2049; MNT_Port = 2050; Enable_NLM = false;\n"
	"	Enable_RQUOTA = false; Enable_UDP = false; }\n"
	"NFSv4 { Graceless = true; Lease_Lifetime = 10; RecoveryRoot = \"/run/recovery\";\n"
	"	Minor_Versions = 1, 2; Delegations = false; }\n"
	"NFS_KRB5 { Active_krb5 = false; }\n"
	"LOG { Default_Log_Level = EVENT; }\n"
	"EXPORT { Export_Id = 7; Path = \"" NFS_SERVER_FOLDER "\"; Pseudo = \"/export\";\n"
	"	Access_Type = RW; Squash = No_Root_Squash; SecType = sys; Protocols = 3, 4;\n"
	"	Transports = TCP; FSAL { Name = VFS; } }\n";

static int server = -1;

const char *nfs_server_missing(void)
{
	if (access(SERVER, X_OK) || access(PORTMAPPER, X_OK))
		return "nfs-ganesha is not installed";
	return NULL;
}

/*
 * Creates /etc/mtab, by which the server finds what it exports. systemd creates it; containers lack
 * it.
 */
static bool provide_mtab(void)
{
	return !access("/etc/mtab", F_OK) ||
	       !system("cp -a /etc /run/etc && ln -s /proc/self/mounts /run/etc/mtab && "
		       "mount --bind /run/etc /etc");
}

bool nfs_server_start(unsigned mebibytes)
{
	char *const portmapper[] = { (char[]){ PORTMAPPER }, (char[]){ "-f" }, NULL };
	char *const arguments[] = { (char[]){ SERVER },
				    (char[]){ "-F" },
				    (char[]){ "-f/run/ganesha.conf" },
				    (char[]){ "-LSTDOUT" },
				    (char[]){ "-p/run/ganesha.pid" },
				    NULL };
	char room[64];
	FILE *file;

	snprintf(room, sizeof(room), "size=%uM,mode=777", mebibytes);
	mkdir(NFS_SERVER_FOLDER, 0777);
	mkdir(NFS_CLIENT_FOLDER, 0777);
	mkdir(NFS_OTHER_FOLDER, 0777);
	mkdir("/run/recovery", 0777);
	mkdir("/run/ganesha", 0777);
	mkdir("/run/rpcbind", 0777);
	if (mount("none", NFS_SERVER_FOLDER, "tmpfs", 0, room) || !provide_mtab())
		return false;
	file = fopen("/run/ganesha.conf", "we");
	if (!file || fputs(configuration, file) < 0 || fclose(file))
		return false;
	machine_start(portmapper, "/run/rpcbind.log");
	if (!machine_wait_for_port(111, START_MS))
		return false;
	server = machine_start(arguments, "/run/ganesha.log");
	return machine_wait_for_port(PORT, START_MS) && machine_wait_for_port(MOUNT_PORT, START_MS);
}

/*
 * Mounts the export. Names and attributes are cached for a second at most, instead of up to a
 * minute.
 */
static bool mount_at(const char *folder, const char *version, const char *options)
{
	bool third = !strcmp(version, "3");
	char data[512];

	if (third)
		snprintf(data, sizeof(data),
			 "addr=127.0.0.1,vers=3,proto=tcp,port=%u,mountproto=tcp,"
			 "mountaddr=127.0.0.1,mountport=%u,nolock,actimeo=1%s",
			 PORT, MOUNT_PORT, options);
	else
		snprintf(data, sizeof(data),
			 "addr=127.0.0.1,clientaddr=127.0.0.1,vers=%s,proto=tcp,port=%u,actimeo=1"
			 "%s",
			 version, PORT, options);
	if (!mount(third ? "127.0.0.1:" NFS_SERVER_FOLDER : "127.0.0.1:/export", folder,
		   third ? "nfs" : "nfs4", 0, data))
		return true;
	printf("# mount of version %s: %s\n", version, strerror(errno));
	return false;
}

bool nfs_server_mount(const char *version)
{
	return mount_at(NFS_CLIENT_FOLDER, version, "") &&
	       mount_at(NFS_OTHER_FOLDER, version, ",nosharecache");
}

void nfs_server_unmount(void)
{
	umount2(NFS_OTHER_FOLDER, MNT_DETACH);
	umount2(NFS_CLIENT_FOLDER, MNT_DETACH);
}

void nfs_server_signal(int number)
{
	if (server > 0)
		kill(server, number);
}
