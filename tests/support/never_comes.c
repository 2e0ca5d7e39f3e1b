#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

/* Preloaded: a call with `never-comes` in its path does not return, and no signal but SIGKILL interrupts it, as in a file
   system that is away. The thread waits for a child of vfork, which ends with it. */
static void look_at(const char *path) {
    if (path == NULL || strstr(path, "never-comes") == NULL) return;
    if (vfork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) pause();
    }
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        look_at(path); \
        return REAL(name)(path, flags, mode); \
    }

OPEN(open)
OPEN(open64)

int stat(const char *path, struct stat *into) {
    look_at(path);
    return REAL(stat)(path, into);
}

int stat64(const char *path, struct stat64 *into) {
    look_at(path);
    return REAL(stat64)(path, into);
}
