/* A file system in C that passes every request on to a directory: a reference of `kvfuse bench door`.
 *
 * It is what libfuse's low-level API and the kernel leave to a file system that does nothing itself. Timeouts and cached
 * pages are those of the mount, so that the kernel asks both alike; libfuse's threads answer in parallel. A node of the
 * kernel has a descriptor (O_PATH) here, from its first lookup until the kernel forgets it.
 *
 * Usage: passthrough DIRECTORY MOUNTPOINT. SIGTERM or an unmount ends it.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 34
#include <fuse_lowlevel.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define TIMEOUT_S 60.0 /* of names and attributes, as the mount has by default */
#define NEGATIVE_TIMEOUT_S 1.0
#define BUCKETS 65536
#define FILES_MAX (1 << 20)

struct node {
    int fd;
    ino_t ino;
    uint64_t lookups;
    struct node *next; /* of its bucket */
};

struct folder {
    DIR *stream;
    struct dirent *entry; /* read, and not answered yet */
    off_t offset;         /* after the last one that was answered */
};

static struct node root = {.fd = -1, .lookups = 1};
static struct node *buckets[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of buckets and lookups */

static struct node *node_of(fuse_ino_t ino) { return ino == FUSE_ROOT_ID ? &root : (struct node *)(uintptr_t)ino; }

static int fd_of(fuse_ino_t ino) { return node_of(ino)->fd; }

static struct folder *folder_of(struct fuse_file_info *info) { return (struct folder *)(uintptr_t)info->fh; }

/* A path of the node's file, for calls that take no O_PATH descriptor. */
struct path { char text[32]; };

static struct path path_of(fuse_ino_t ino) {
    struct path path;
    snprintf(path.text, sizeof path.text, "/proc/self/fd/%d", fd_of(ino));
    return path;
}

static void reply(fuse_req_t request, int result) { fuse_reply_err(request, result < 0 ? errno : 0); }

/* -- nodes --------------------------------------------------------------------------------------------- */

/* Look a name up and count that. An errno, or 0. */
static int enter(fuse_ino_t parent, const char *name, struct fuse_entry_param *entry) {
    memset(entry, 0, sizeof *entry);
    entry->entry_timeout = entry->attr_timeout = TIMEOUT_S;
    int fd = openat(fd_of(parent), name, O_PATH | O_NOFOLLOW);
    if (fd < 0 || fstat(fd, &entry->attr) < 0) {
        int error = errno;
        if (fd >= 0) close(fd);
        return error;
    }
    struct node **bucket = &buckets[entry->attr.st_ino % BUCKETS], *node;
    pthread_mutex_lock(&lock);
    for (node = *bucket; node && node->ino != entry->attr.st_ino; node = node->next);
    if (node) {
        node->lookups++;
        close(fd);
    } else if ((node = malloc(sizeof *node))) {
        *node = (struct node){.fd = fd, .ino = entry->attr.st_ino, .lookups = 1, .next = *bucket};
        *bucket = node;
    } else {
        close(fd);
    }
    pthread_mutex_unlock(&lock);
    entry->ino = (uintptr_t)node;
    return node ? 0 : ENOMEM;
}

static void leave(fuse_ino_t ino, uint64_t count) {
    struct node *node = node_of(ino);
    if (node == &root) return;
    pthread_mutex_lock(&lock);
    node->lookups -= count;
    int is_gone = node->lookups == 0;
    if (is_gone) {
        struct node **place = &buckets[node->ino % BUCKETS];
        while (*place != node) place = &(*place)->next;
        *place = node->next;
    }
    pthread_mutex_unlock(&lock);
    if (is_gone) {
        close(node->fd);
        free(node);
    }
}

static void reply_entry(fuse_req_t request, fuse_ino_t parent, const char *name) {
    struct fuse_entry_param entry;
    int error = enter(parent, name, &entry);
    if (error) fuse_reply_err(request, error);
    else fuse_reply_entry(request, &entry);
}

static void do_lookup(fuse_req_t request, fuse_ino_t parent, const char *name) {
    struct fuse_entry_param entry;
    int error = enter(parent, name, &entry);
    if (error && error != ENOENT) {
        fuse_reply_err(request, error);
        return;
    }
    if (error) entry.entry_timeout = NEGATIVE_TIMEOUT_S; /* node 0: the kernel keeps that there is none */
    fuse_reply_entry(request, &entry);
}

static void do_forget(fuse_req_t request, fuse_ino_t ino, uint64_t count) {
    leave(ino, count);
    fuse_reply_none(request);
}

static void do_forget_multi(fuse_req_t request, size_t count, struct fuse_forget_data *forgets) {
    for (size_t i = 0; i < count; i++) leave(forgets[i].ino, forgets[i].nlookup);
    fuse_reply_none(request);
}

static void do_getattr(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *info) {
    struct stat attributes;
    (void)info;
    if (fstat(fd_of(ino), &attributes) < 0) reply(request, -1);
    else fuse_reply_attr(request, &attributes, TIMEOUT_S);
}

static struct timespec time_to_set(int valid, int set, int now, struct timespec time) {
    if (valid & now) return (struct timespec){.tv_nsec = UTIME_NOW};
    return valid & set ? time : (struct timespec){.tv_nsec = UTIME_OMIT};
}

static void do_setattr(fuse_req_t request, fuse_ino_t ino, struct stat *new, int valid, struct fuse_file_info *info) {
    struct path path = path_of(ino);
    int result = 0;
    if (valid & FUSE_SET_ATTR_MODE) result = chmod(path.text, new->st_mode);
    if (result == 0 && valid & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID)) {
        uid_t uid = valid & FUSE_SET_ATTR_UID ? new->st_uid : (uid_t)-1;
        gid_t gid = valid & FUSE_SET_ATTR_GID ? new->st_gid : (gid_t)-1;
        result = fchownat(fd_of(ino), "", uid, gid, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW);
    }
    if (result == 0 && valid & FUSE_SET_ATTR_SIZE)
        result = info ? ftruncate(info->fh, new->st_size) : truncate(path.text, new->st_size);
    if (result == 0 && valid & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME)) {
        struct timespec times[2] = {
            time_to_set(valid, FUSE_SET_ATTR_ATIME, FUSE_SET_ATTR_ATIME_NOW, new->st_atim),
            time_to_set(valid, FUSE_SET_ATTR_MTIME, FUSE_SET_ATTR_MTIME_NOW, new->st_mtim),
        };
        result = utimensat(AT_FDCWD, path.text, times, 0);
    }
    if (result < 0) reply(request, result);
    else do_getattr(request, ino, info);
}

/* -- names --------------------------------------------------------------------------------------------- */

static void do_mkdir(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode) {
    if (mkdirat(fd_of(parent), name, mode) < 0) reply(request, -1);
    else reply_entry(request, parent, name);
}

static void do_link(fuse_req_t request, fuse_ino_t ino, fuse_ino_t parent, const char *name) {
    struct path path = path_of(ino);
    if (linkat(AT_FDCWD, path.text, fd_of(parent), name, AT_SYMLINK_FOLLOW) < 0) reply(request, -1);
    else reply_entry(request, parent, name);
}

static void do_unlink(fuse_req_t request, fuse_ino_t parent, const char *name) {
    reply(request, unlinkat(fd_of(parent), name, 0));
}

static void do_rmdir(fuse_req_t request, fuse_ino_t parent, const char *name) {
    reply(request, unlinkat(fd_of(parent), name, AT_REMOVEDIR));
}

static void do_rename(fuse_req_t request, fuse_ino_t parent, const char *name, fuse_ino_t new_parent,
                      const char *new_name, unsigned flags) {
    reply(request, renameat2(fd_of(parent), name, fd_of(new_parent), new_name, flags));
}

static void do_opendir(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *info) {
    int fd = openat(fd_of(ino), ".", O_RDONLY | O_DIRECTORY);
    struct folder *folder = fd < 0 ? NULL : calloc(1, sizeof *folder);
    if (!folder || !(folder->stream = fdopendir(fd))) {
        reply(request, -1);
        if (fd >= 0) close(fd);
        free(folder);
        return;
    }
    info->fh = (uintptr_t)folder;
    fuse_reply_open(request, info);
}

static void do_readdirplus(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *info) {
    struct folder *folder = folder_of(info);
    char answer[size];
    size_t used = 0;
    if (offset != folder->offset) {
        seekdir(folder->stream, offset);
        folder->entry = NULL;
    }
    while (folder->entry || (folder->entry = readdir(folder->stream))) {
        const char *name = folder->entry->d_name;
        struct fuse_entry_param entry = {.attr = {.st_ino = folder->entry->d_ino, .st_mode = S_IFDIR}};
        int error = strcmp(name, ".") != 0 && strcmp(name, "..") != 0 ? enter(ino, name, &entry) : 0;
        if (error == ENOENT) {
            folder->entry = NULL; /* it was removed meanwhile */
            continue;
        }
        if (error) {
            fuse_reply_err(request, error);
            return;
        }
        size_t more = fuse_add_direntry_plus(request, answer + used, size - used, name, &entry, folder->entry->d_off);
        if (more > size - used) {
            if (entry.ino) leave(entry.ino, 1);
            break;
        }
        used += more;
        folder->offset = folder->entry->d_off;
        folder->entry = NULL;
    }
    fuse_reply_buf(request, answer, used);
}

static void do_releasedir(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *info) {
    struct folder *folder = folder_of(info);
    (void)ino;
    closedir(folder->stream);
    free(folder);
    fuse_reply_err(request, 0);
}

/* -- content ------------------------------------------------------------------------------------------- */

/* The kernel gives offsets, and has a cache of its own. */
static int flags_of(const struct fuse_file_info *info) { return info->flags & ~(O_APPEND | O_DIRECT | O_NOFOLLOW); }

static void do_create(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode,
                      struct fuse_file_info *info) {
    struct fuse_entry_param entry;
    int fd = openat(fd_of(parent), name, flags_of(info) | O_CREAT, mode);
    int error = fd < 0 ? errno : enter(parent, name, &entry);
    if (error) {
        if (fd >= 0) close(fd);
        fuse_reply_err(request, error);
        return;
    }
    info->fh = fd;
    info->keep_cache = 1;
    fuse_reply_create(request, &entry, info);
}

static void do_open(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *info) {
    struct path path = path_of(ino);
    int fd = open(path.text, flags_of(info));
    if (fd < 0) {
        reply(request, -1);
        return;
    }
    info->fh = fd;
    info->keep_cache = 1;
    fuse_reply_open(request, info);
}

static void do_read(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *info) {
    static _Thread_local char *buffer; /* of this thread, never freed */
    static _Thread_local size_t buffer_size;
    (void)ino;
    if (size > buffer_size) {
        free(buffer);
        buffer = malloc(size);
        buffer_size = buffer ? size : 0;
    }
    ssize_t found = buffer ? pread(info->fh, buffer, size, offset) : -1;
    if (found < 0) reply(request, -1);
    else fuse_reply_buf(request, buffer, found);
}

static void do_write(fuse_req_t request, fuse_ino_t ino, const char *data, size_t size, off_t offset,
                     struct fuse_file_info *info) {
    (void)ino;
    ssize_t written = pwrite(info->fh, data, size, offset);
    if (written < 0) reply(request, -1);
    else fuse_reply_write(request, written);
}

static void do_release(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *info) {
    (void)ino;
    reply(request, close(info->fh));
}

static void do_fsync(fuse_req_t request, fuse_ino_t ino, int data_only, struct fuse_file_info *info) {
    (void)ino;
    reply(request, data_only ? fdatasync(info->fh) : fsync(info->fh));
}

/* The kernel asks for some before writes. With ENOSYS it would stop asking, and the mount has attributes. */
static void do_getxattr(fuse_req_t request, fuse_ino_t ino, const char *name, size_t size) {
    (void)ino, (void)name, (void)size;
    fuse_reply_err(request, ENODATA);
}

static void do_statfs(fuse_req_t request, fuse_ino_t ino) {
    struct statvfs figures;
    if (fstatvfs(fd_of(ino), &figures) < 0) reply(request, -1);
    else fuse_reply_statfs(request, &figures);
}

static const struct fuse_lowlevel_ops operations = {
    .lookup = do_lookup, .forget = do_forget, .forget_multi = do_forget_multi, .getattr = do_getattr,
    .setattr = do_setattr, .mkdir = do_mkdir, .link = do_link, .unlink = do_unlink, .rmdir = do_rmdir,
    .rename = do_rename, .opendir = do_opendir, .readdirplus = do_readdirplus, .releasedir = do_releasedir,
    .create = do_create, .open = do_open, .read = do_read, .write = do_write, .release = do_release,
    .fsync = do_fsync, .getxattr = do_getxattr, .statfs = do_statfs,
};

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: passthrough DIRECTORY MOUNTPOINT\n");
        return 2;
    }
    struct rlimit files = {FILES_MAX, FILES_MAX};
    if (setrlimit(RLIMIT_NOFILE, &files) < 0 && getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    umask(0); /* the kernel has applied the caller's */
    if ((root.fd = open(words[1], O_PATH | O_DIRECTORY)) < 0) {
        perror(words[1]);
        return 1;
    }
    struct fuse_args arguments = FUSE_ARGS_INIT(0, NULL);
    struct fuse_loop_config loop = {.clone_fd = 0, .max_idle_threads = 10};
    fuse_opt_add_arg(&arguments, words[0]);
    fuse_opt_add_arg(&arguments, "-ofsname=passthrough");
    struct fuse_session *session = fuse_session_new(&arguments, &operations, sizeof operations, NULL);
    if (!session || fuse_set_signal_handlers(session) < 0 || fuse_session_mount(session, words[2]) < 0) return 1;
    int result = fuse_session_loop_mt(session, &loop);
    fuse_session_unmount(session);
    fuse_session_destroy(session);
    return result != 0;
}
